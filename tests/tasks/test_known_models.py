"""A known generator is asked as its card says; what somebody sets wins; nobody else's settings
change."""

from pathlib import Path

import pytest

from flows.benchmark import synthesis_for
from flows.config import PipelineConfig, load_profile
from kernels_eval.records import Language, SamplingParams
from tasks.benchmark.config import BenchmarkConfig
from tasks.store import snapshot as store
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.known_models import KNOWN_MODELS, sampling_for
from tasks.synthesis.stage import Synthesis
from tests.support.cases import cases

CASES = cases("known_models")

ROOT = Path(store.__file__).parents[2]
KEVIN, QWQ, KERNEL_CODER = "cognition-ai/Kevin-32B", "Qwen/QwQ-32B", "lkongam/KernelCoder"
CARDS = CASES["cards"]


def asked(model, **sampling):
    given = {"sampling": sampling} if sampling else {}
    return SynthesisConfig.model_validate(
        {"sampler": "openai", "model": model, "base_url": "http://h/v1", **given}
    ).sampling


@pytest.mark.parametrize("model", CARDS)
def test_a_known_model_is_asked_as_its_card_says(model):
    assert asked(model).identity == CARDS[model] | {"seed": 0}
    assert asked(model.lower()) == asked(model), "the hub does not tell upper case from lower"


def test_the_table_holds_these_models_and_only_settings_that_exist():
    assert set(KNOWN_MODELS) == set(CARDS)
    for settings in KNOWN_MODELS.values():
        assert SamplingParams(**settings).identity.items() >= settings.items()


@pytest.mark.parametrize(
    "model",
    [
        None,
        "/models/QwQ-32B",
        "./Qwen/QwQ-32B",
        "Qwen/QwQ-32B-Preview",
        "Qwen/QwQ-32B-AWQ",
    ],
)
def test_any_other_model_has_the_defaults_of_before(model):
    assert asked(model).identity == {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 16384,
        "seed": 0,
    }


def test_what_is_set_wins_even_where_it_is_the_default():
    assert asked(QWQ, temperature=1.0, max_tokens=100).identity == CARDS[QWQ] | {
        "temperature": 1.0,
        "max_tokens": 100,
        "seed": 0,
    }
    assert asked(QWQ, top_k=0).top_k == 0
    assert "top_k" not in asked(QWQ, top_k=None).identity, (
        "null: for an endpoint that has no such setting"
    )
    assert asked(KEVIN, repetition_penalty=1.05).repetition_penalty == 1.05


def test_recorded_responses_were_drawn_long_ago():
    assert SynthesisConfig(sampler="recorded", model=QWQ).sampling == SamplingParams()


def test_resolving_changes_neither_its_argument_nor_the_table():
    sampling = SamplingParams(seed=3)
    assert sampling_for(QWQ, sampling).identity == CARDS[QWQ] | {"seed": 3}
    assert sampling == SamplingParams(seed=3)
    with pytest.raises(TypeError):
        KNOWN_MODELS[QWQ]["temperature"] = 2.0  # type: ignore[index]


# -- the benchmark ---------------------------------------------------------------------------------


def line(base_model, **benchmark):
    return PipelineConfig.model_validate(
        {"training": {"base_model": base_model}, **({"benchmark": benchmark} if benchmark else {})}
    )


def test_base_and_tuned_are_asked_as_the_base_models_card_says():
    for config in (line(QWQ), line(QWQ, samples_per_task=10)):
        assert config.benchmark.sampling.identity == CARDS[QWQ] | {"seed": 0}, (
            "4,096 tokens are the default for models that are not known"
        )
    config = line(QWQ, sampling={"temperature": 0.1})
    assert config.benchmark.sampling.identity == CARDS[QWQ] | {"temperature": 0.1, "seed": 0}
    for model in ("base", "tuned"):
        assert synthesis_for(config, model).sampling == config.benchmark.sampling


def test_the_benchmark_of_any_other_model_is_what_it_was():
    assert line("/models/QwQ-32B").benchmark == BenchmarkConfig()
    assert BenchmarkConfig().sampling == SamplingParams(max_tokens=4096)
    config = line("/models/QwQ-32B", sampling={"temperature": 0.8})
    assert config.benchmark.sampling == SamplingParams(temperature=0.8)


def test_a_profile_of_ones_own_asks_the_small_model_for_few_tokens(tmp_path):
    """4,096 each keep a laptop busy for longer than its user waits."""
    own = tmp_path / "mine.yaml"
    own.write_text("name: mine\n")
    for config in (load_profile(str(own)), PipelineConfig(), load_profile("cuda")):
        assert config.benchmark.sampling.identity == CARDS["small"] | {"seed": 0}
    sampling = load_profile("local").benchmark.sampling
    assert sampling.identity == CARDS["small-pretrained"] | {"seed": 0}
    config = load_profile(str(own), ["benchmark.sampling.max_tokens=4096"])
    assert config.benchmark.sampling.max_tokens == 4096


def test_a_fault_in_the_training_section_is_told_as_that():
    with pytest.raises(ValueError, match="training.lora_rank"):
        PipelineConfig.model_validate({"training": {"base_model": QWQ, "lora_rank": 0}})


# -- one effective value everywhere ----------------------------------------------------------------


def test_the_paper_profile_asks_as_the_paper_did():
    config = load_profile("paper")
    assert config.synthesis.sampling.identity == CARDS[KEVIN] | {"seed": 0}
    assert config.benchmark.sampling.identity == CARDS[QWQ] | {"max_tokens": 32768, "seed": 0}
    other = load_profile(
        "paper", [f"synthesis.model={KERNEL_CODER}", "synthesis.sampling.min_p=0.05"]
    )
    assert other.synthesis.sampling.identity == CARDS[KERNEL_CODER] | {"min_p": 0.05, "seed": 0}


@pytest.mark.parametrize("sampling", CASES["survives_json"])
def test_a_configuration_survives_json_with_its_effective_values(sampling):
    config = line(QWQ, sampling=sampling).model_copy(
        update={
            "synthesis": SynthesisConfig(
                sampler="openai", model=QWQ, sampling=SamplingParams(**sampling)
            )
        }
    )
    dumped = config.model_dump(mode="json")
    again = PipelineConfig.model_validate(dumped)
    assert again == config and again.model_dump(mode="json") == dumped
    assert again.synthesis.sampling.identity == config.synthesis.sampling.identity
    assert dumped["synthesis"]["sampling"].get("top_p") == 0.95, (
        "what is printed and shown is what is sent"
    )


def test_a_default_and_the_same_value_spelled_out_are_one_snapshot(tmp_path):
    tasks = SnapshotRef(root=str(tmp_path), stage="tasks", fingerprint="t")

    def fingerprint(model, **sampling):
        config = SynthesisConfig(
            sampler="openai",
            model=model,
            base_url="http://h/v1",
            sampling=SamplingParams(**sampling),
        )
        return Synthesis(tasks, config, Language.CUDA).snapshot.fingerprint

    assert fingerprint(QWQ) == fingerprint(QWQ, **CARDS[QWQ])
    others = [{"temperature": 0.5}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]
    assert len({fingerprint(QWQ, **other) for other in [{}, *others]}) == 5
