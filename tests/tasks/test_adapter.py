"""What leaves training: an adapter that vLLM takes, merged weights only where they agree, and a
card that tells the run."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from kernels_eval.errors import EvalError, UsageError
from tasks.models import load_causal_model, load_tokenizer
from tasks.sources.small_model import build_small_model
from tasks.store.snapshot import ADAPTER_WEIGHTS
from tasks.training.adapter import AdapterFacts, check_adapter
from tasks.training.card import card, sources_of, write_card
from tasks.training.formatting import Dropped
from tasks.training.merge import MERGE, MergeCheck, merge_adapter
from tasks.training.recipe import PROJECTIONS, TrainingRecipe
from tasks.training.result import HISTORY, TrainingResult
from tests.support.cases import cases

CASES = cases("training")

TEXT = "Write a kernel that adds one to every element of a tensor.\n" + "x = x + 1\n" * 40
PROBES = [TEXT, "<think>\nFour at a time.\n</think>\n\nclass ModelNew: pass"]
PYTHON = (
    os.environ.get("CONCUR_VLLM_PYTHON")
    or Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model in bfloat16, as the models are that are trained on: what is merged into it is
    rounded."""
    import torch

    plain = build_small_model(tmp_path_factory.mktemp("models") / "plain", PROBES)
    directory = plain.with_name("small")
    load_causal_model(plain, dtype=torch.bfloat16).save_pretrained(directory)
    load_tokenizer(plain).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def make(base, tmp_path_factory):
    def make(*, scale=1.0, untrained=False, **changes):
        """A LoRA adapter of rank 32 on the seven projections with random matrices; `scale` is by
        how much it changes the model."""
        import torch
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        settings = {
            "r": 32,
            "lora_alpha": 32,
            "target_modules": list(PROJECTIONS),
            "task_type": "CAUSAL_LM",
            **changes,
        }
        model = get_peft_model(
            load_causal_model(base, dtype=torch.float32),
            LoraConfig(init_lora_weights=untrained, **settings),
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(scale)
        directory = tmp_path_factory.mktemp("run") / "adapter"
        model.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="module")
def adapter(make):
    return make()


# -- the directory ---------------------------------------------------------------------------------


def test_an_adapter_of_ours_is_told_as_it_is(base, adapter):
    facts = check_adapter(adapter)
    assert (
        facts.rank == 32
        and set(facts.target_modules) == set(PROJECTIONS)
        and facts.modules == 2 * 7
    ), "seven projections in each of two layers"
    shape = json.loads((base / "config.json").read_text())
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    pairs = (
        2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + wide)
    )  # q and o, k and v, gate, up and down
    assert facts.parameters == 2 * 32 * pairs
    assert facts.size_bytes == (adapter / ADAPTER_WEIGHTS).stat().st_size


def test_an_adapter_that_learned_nothing_is_refused(make):
    with pytest.raises(UsageError, match="changes nothing"):
        check_adapter(make(untrained=True))


def test_damaged_foreign_and_diverged_adapters_are_refused(adapter, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    with pytest.raises(UsageError, match="is no LoRA adapter"):
        check_adapter(tmp_path)
    broken = shutil.copytree(adapter, tmp_path / "broken")
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    name = next(name for name in tensors if "lora_B" in name)
    for change, said in (
        ({name: torch.full_like(tensors[name], float("nan"))}, "not finite"),
        ({name: None}, "without their partners"),
        ({name: tensors[name][:0]}, re.escape(name)),
    ):
        save_file(
            {key: value for key, value in {**tensors, **change}.items() if value is not None},
            broken / ADAPTER_WEIGHTS,
        )
        with pytest.raises(UsageError, match=said):
            check_adapter(broken)
    (broken / ADAPTER_WEIGHTS).write_bytes((adapter / ADAPTER_WEIGHTS).read_bytes()[:1000])
    with pytest.raises(UsageError, match="is no LoRA adapter"):
        check_adapter(broken)


# -- merged weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_answer_as_base_and_adapter_do(base, adapter, tmp_path, dtype):
    import torch
    from peft import PeftModel

    out = tmp_path / "merged"
    check = merge_adapter(base, adapter, out, PROBES, dtype=dtype)
    print(dtype, check, f"relative {check.relative_difference:.2e}")
    tokenizer = load_tokenizer(out)
    merged = load_causal_model(out, dtype=torch.float32)
    assert next(load_causal_model(out, dtype="auto").parameters()).dtype == getattr(torch, dtype)
    apart = PeftModel.from_pretrained(
        load_causal_model(base, dtype=torch.float32), str(adapter)
    ).eval()
    encoded = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        distance = (merged(**encoded).logits - apart(**encoded).logits).abs().max()
        moved = (
            (
                apart(**encoded).logits
                - load_causal_model(base, dtype=torch.float32)(**encoded).logits
            )
            .abs()
            .max()
        )
    assert 0 < distance < 0.2 * moved, "and it is not the base model"
    assert MergeCheck.model_validate_json((out / MERGE).read_text()) == check and check.agrees
    assert check.positions == sum(len(load_tokenizer(base)(text)["input_ids"]) for text in PROBES)


def test_an_adapter_too_weak_for_bfloat16_is_not_published_merged(base, make, tmp_path):
    weak = make(scale=1e-3)
    with pytest.raises(
        EvalError, match="merged weights in bfloat16 are not published.*merge in float32"
    ):
        merge_adapter(base, weak, tmp_path / "merged", PROBES, dtype="bfloat16")
    assert list(tmp_path.iterdir()) == [], "nothing is left, under any name"
    assert merge_adapter(base, weak, tmp_path / "merged", PROBES, dtype="float32").agrees


def test_a_merge_needs_a_new_directory_and_a_probe(base, adapter, tmp_path):
    with pytest.raises(UsageError, match="exists"):
        merge_adapter(base, adapter, tmp_path, PROBES)
    with pytest.raises(UsageError, match="no probe"):
        merge_adapter(base, adapter, tmp_path / "merged", [""])


def test_an_adapter_without_effect_agrees_with_nothing():
    facts = {"dtype": "float32", "positions": 2, "difference_rms": 0.0, "tolerance": 1.0}
    assert MergeCheck(effect_rms=1.0, **facts).agrees
    assert not MergeCheck(effect_rms=0.0, **facts).agrees


# -- the card --------------------------------------------------------------------------------------


RESULT = TrainingResult(
    adapter_dir=Path("adapter"),
    log=tuple(
        dict.fromkeys(HISTORY.names)
        | {"step": 612 * epoch, "epoch": float(epoch), "held_out_loss": 0.71 - 0.05 * epoch}
        for epoch in range(3)
    ),
    loss_first=0.61234,
    loss_last=0.48768,
    steps=1836,
    tokens=90_000_000,
    seconds=41_000,
    rows=4892,
    held_out_tasks=93,
    dropped=(
        *(Dropped(candidate_id="c", reason="overlong", tokens=9) for _ in range(12)),
        Dropped(candidate_id="c", reason="empty_answer", tokens=9),
    ),
)
ADAPTER = AdapterFacts(
    rank=32,
    target_modules=("q_proj", "v_proj"),
    modules=128,
    parameters=1_000_000,
    size_bytes=4_200_000,
)
FACTS = CASES["card_facts"]


def parts(text):
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_a_card_tells_the_run(tmp_path):
    (tmp_path / "README.md").write_text("PEFT's empty form")
    result = RESULT.model_copy(update={"adapter_dir": tmp_path})
    front, body = parts(write_card(result, TrainingRecipe(), ADAPTER, **FACTS).read_text())
    assert front["base_model"] == "Qwen/QwQ-32B" and front["library_name"] == "peft"
    (loss,) = front["model-index"][0]["results"]
    assert loss["metrics"] == [{"type": "loss", "value": 0.61}]
    for said in CASES["card_words"]:
        assert said in body, said
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_value_that_is_not_the_default_is_not_told_as_the_papers():
    sources = sources_of(TrainingRecipe(num_epochs=2))
    assert sources["num_epochs"].startswith("set for this run, the default is 3; paper")
    assert sources["lora_rank"].startswith("paper")


def test_a_card_leaves_out_what_is_not_known_and_tells_no_path(tmp_path):
    base = tmp_path / "models" / "small-1a2b"
    base.mkdir(parents=True)
    result = RESULT.model_copy(update={"log": (), "dropped": ()})
    facts = FACTS | {"base_model": str(base), "strategy": None, "tools": {}}
    front, body = parts(card(result, TrainingRecipe(), ADAPTER, **facts))
    assert "base_model" not in front and str(tmp_path) not in body and "`small-1a2b`" in body
    assert "No tasks were held out." in body
    assert "not trained on" not in body
    assert "strategy `" not in body
    assert "Made with" not in body


@pytest.mark.parametrize(
    "name", ["a|b", "x`y", "---\nbase_model: other", "$(rm -rf .)", "<script>"]
)
def test_a_name_breaks_neither_the_front_matter_nor_the_command(name):
    import shlex

    front, body = parts(
        card(RESULT, TrainingRecipe(), ADAPTER, **FACTS | {"name": name, "base_model": name})
    )
    assert "base_model" not in front
    command = (
        next(line for line in body.splitlines() if line.startswith("vllm serve"))
        if "\n" not in name
        else None
    )
    if command:
        assert shlex.split(command)[-1] == f"{name}=DIRECTORY"
    assert "<script>" not in re.sub(r"```.*?```|`[^`]*`", "", body, flags=re.DOTALL), (
        "outside of code, text is no markup"
    )


# -- a real vLLM -----------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs a vLLM environment: make vllm")
@pytest.mark.timeout(600)
def test_vllm_serves_an_adapter_that_passed_by_its_name_and_the_merged_weights_answer_alike(
    base, adapter, tmp_path
):
    """Greedy, in float32: under its name vLLM says what the merged files say in transformers, and
    not what the base model says."""
    from kernels_eval.records import KernelTask, Language, SamplingParams
    from tasks.synthesis.config import ServerConfig
    from tasks.synthesis.local import TransformersSampler
    from tasks.synthesis.sampler import Request
    from tasks.synthesis.server import VllmSampler

    check_adapter(adapter)
    merge_adapter(base, adapter, tmp_path / "merged", PROBES, dtype="float32")
    task = KernelTask(task_id="t", name="t", code="class Model: pass")
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    request = Request(
        request_key="r",
        task=task,
        language=Language.CPP,
        prompt=TEXT,
        sample_index=0,
        sampling=sampling,
    )
    command = f"env VLLM_NO_USAGE_STATS=1 {PYTHON} -m vllm.entrypoints.cli.main serve"
    args = ("--max-num-seqs", "2", "--dtype", "float32")
    said = {}
    for name, chosen in (("small", None), ("tuned", adapter)):
        config = ServerConfig(command=command, args=args)
        served = VllmSampler(str(base), "small", config, chosen, logs=tmp_path / "logs")
        try:
            (response,) = served.sample([request])
            said[name] = response.text
        finally:
            served.close()
    for name, directory in (("small", base), ("tuned", tmp_path / "merged")):
        (response,) = TransformersSampler(directory, None, name).sample([request])
        assert said[name] == response.text, name
    assert said["tuned"] != said["small"]
