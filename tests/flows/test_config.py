"""Profiles: every one that ships loads, and every way to write one wrongly is one line that names
the key and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.config import PipelineConfig, load_profile, profile_names, profiles_dir
from kernels_eval.errors import UsageError
from kernels_eval.records import Language

SHIPPED = sorted(profiles_dir().glob("*.yaml"))


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_profile_loads_by_name_and_by_path(path: Path) -> None:
    by_name = load_profile(path.stem)
    assert by_name == load_profile(str(path))
    assert by_name.name == path.stem  # run names say which profile it was
    assert (
        PipelineConfig.model_validate(by_name.model_dump(mode="json")) == by_name
    )  # what Prefect stores and reads back


def test_the_profiles_are_those_that_the_docs_name() -> None:
    assert profile_names() == [path.stem for path in SHIPPED]
    assert set(profile_names()) >= {"local", "paper", "nightly", "cuda"}


def test_the_embedded_profiles_need_neither_gpu_nor_network() -> None:
    for name in ("local", "nightly"):
        config = load_profile(name)
        assert (config.language, config.tasks.source, config.synthesis.sampler) == (
            Language.CPP,
            "bundled",
            "recorded",
        )
        assert (config.training.base_model, config.benchmark.tasks.source) == ("small", "bundled")
        assert config.tasks.split == "train" and config.benchmark.tasks.split == "heldout"
        assert config.tracking_uri.startswith("sqlite:////")


def test_the_cuda_profile_differs_from_local_in_language_only_where_it_matters() -> None:
    cuda, local = load_profile("cuda"), load_profile("local")
    assert cuda.language is Language.CUDA and cuda.language.needs_gpu
    assert (cuda.tasks, cuda.synthesis, cuda.curation, cuda.training, cuda.benchmark) == (
        local.tasks,
        local.synthesis,
        local.curation,
        local.training,
        local.benchmark,
    )


def test_the_paper_profile_holds_the_papers_numbers() -> None:
    """ConCuR (arXiv 2510.07356): section 3 for the data, the training setup for the recipe."""
    config = load_profile("paper")
    assert config.language is Language.CUDA
    assert config.tasks.source == "kernelbook"
    assert config.synthesis.model == config.synthesis.tokenizer == "cognition-ai/Kevin-32B"
    assert config.synthesis.samples_per_task == 5
    assert (config.synthesis.sampling.temperature, config.synthesis.sampling.max_tokens) == (
        0.9,
        16384,
    )
    assert (
        config.curation.strategy,
        config.curation.min_speedup,
        config.curation.single_operator_quota,
    ) == ("concur", 5.0, 0.5)
    recipe = config.training
    assert recipe.base_model == "Qwen/QwQ-32B"
    assert (recipe.lora_rank, recipe.lora_alpha, recipe.lora_dropout, recipe.num_epochs) == (
        32,
        32,
        0.05,
        3,
    )
    assert (recipe.learning_rate, recipe.lr_schedule, recipe.max_length) == (1e-4, "cosine", "data")
    assert (config.benchmark.tasks.source, config.benchmark.tasks.levels) == ("kernelbench", (1, 2))
    assert config.benchmark.samples_per_task == max(config.benchmark.ks) == 10


def test_lora_defaults_are_the_papers_where_no_profile_says_otherwise() -> None:
    recipe = PipelineConfig().training
    assert (recipe.lora_rank, recipe.lora_alpha, recipe.lora_dropout, recipe.num_epochs) == (
        32,
        32,
        0.05,
        3,
    )
    assert set(recipe.target_modules) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    for name in (
        profile_names()
    ):  # the small model may learn faster, but no profile changes what an adapter is
        shipped = load_profile(name).training
        assert shipped.model_dump(
            include={"lora_rank", "lora_alpha", "lora_dropout", "num_epochs", "target_modules"}
        ) == recipe.model_dump(
            include={"lora_rank", "lora_alpha", "lora_dropout", "num_epochs", "target_modules"}
        )


def test_overrides_reach_every_depth_and_are_yaml() -> None:
    config = load_profile(
        "local",
        [
            "name=mine",
            "verification.workers=2",
            "verification.eval.timing.max_s=0.3",
            "benchmark.ks=[1, 2]",
            "synthesis.tokenizer=null",
            "tracking.enabled=false",
            "benchmark.sampling={temperature: 0.1}",
        ],
    )
    assert (config.name, config.verification.workers, config.verification.eval.timing.max_s) == (
        "mine",
        2,
        0.3,
    )
    assert (config.benchmark.ks, config.synthesis.tokenizer, config.tracking.enabled) == (
        (1, 2),
        None,
        False,
    )
    assert config.benchmark.sampling.temperature == 0.1
    assert (
        config.benchmark.sampling.max_tokens == 16384
    )  # a mapping replaces a mapping: what it leaves out is the default again
    assert config.training == load_profile("local").training


def test_the_last_override_of_a_key_wins() -> None:
    assert (
        load_profile(
            "local", ["synthesis.samples_per_task=2", "synthesis.samples_per_task=4"]
        ).synthesis.samples_per_task
        == 4
    )


def test_an_override_reaches_a_section_that_the_profile_leaves_out(tmp_path: Path) -> None:
    assert (
        load_profile(
            written(tmp_path, "name: bare\n"), ["tracking.experiment=try"]
        ).tracking.experiment
        == "try"
    )


def test_an_empty_profile_is_the_defaults(tmp_path: Path) -> None:
    assert load_profile(written(tmp_path, "# nothing yet\n")) == PipelineConfig()


def test_a_configuration_cannot_be_changed_after_it_was_read() -> None:
    config = load_profile("local")
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        config.training.lora_rank = 8


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("sythesis.sampler=recorded", "sythesis", "did you mean synthesis?"),
        ("verification.worker=2", "verification.worker", "did you mean verification.workers?"),
        ("training.lora_rnk=8", "training.lora_rnk", "did you mean training.lora_rank?"),
        (
            "verification.eval.timing.max_seconds=1",
            "verification.eval.timing.max_seconds",
            "did you mean verification.eval.timing.max_s?",
        ),
        (
            "tasks.xyzzy=1",
            "tasks.xyzzy",
            "known keys here: code_column, levels, limit, location, revision, source, split",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, key: str, nearest: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_profile("local", [override])
    assert repr(key) in caught.value.args[0]
    assert caught.value.hint == nearest


@pytest.mark.parametrize(
    ("override", "key", "shown", "why"),
    [
        ("verification.workers=many", "verification.workers", "'many'", "integer"),
        ("verification.workers=0", "verification.workers", "0", "greater than or equal to 1"),
        ("synthesis.samples_per_task=2.5", "synthesis.samples_per_task", "2.5", "integer"),
        ("training.lora_dropout=1.0", "training.lora_dropout", "1.0", "less than 1"),
        ("benchmark.sampling.top_p=0", "benchmark.sampling.top_p", "0", "greater than 0"),
        (
            "verification.chunk_size=5000",
            "verification.chunk_size",
            "5000",
            "less than or equal to 1024",
        ),
        ("language=rust", "language", "'rust'", "cpp"),
        ("curation.strategy=best", "curation.strategy", "'best'", "concur"),
        ("tasks=bundled", "tasks", "'bundled'", "dictionary"),
    ],
)
def test_a_wrong_type_or_a_value_out_of_range_says_key_value_and_rule(
    override: str, key: str, shown: str, why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_profile("local", [override])
    message = caught.value.args[0]
    assert f"{key} = {shown}" in message and why in message, message
    assert "--set" in caught.value.hint


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("verification.workers", "not key=value"),
        ("=3", "not key=value"),
        ("name=[1,", "not YAML"),
        ("root.deeper=1", "root holds a value"),
    ],
)
def test_an_override_that_cannot_be_read(override: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        load_profile("local", [override])


def test_a_missing_profile_names_the_nearest_or_lists_them() -> None:
    with pytest.raises(UsageError) as caught:
        load_profile("locale")
    assert caught.value.hint == "did you mean local?"
    with pytest.raises(UsageError) as caught:
        load_profile("qqq")
    assert all(name in caught.value.hint for name in profile_names())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone.yaml"):
        load_profile(str(tmp_path / "gone.yaml"))


def test_a_directory_in_place_of_a_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read profile"):
        load_profile(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: [1, 2\nroot: here\n", "is not YAML: line"),
        ("- a\n- b\n", "is a list, not a mapping"),
        ("just words\n", "is a str, not a mapping"),
        ("a: b: c\n", "is not YAML: line 1"),
    ],
)
def test_text_that_is_no_mapping(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        load_profile(written(tmp_path, text))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(UsageError, match="is not YAML"):
        load_profile(str(path))


def test_where_tracking_goes_unless_said_otherwise(tmp_path: Path) -> None:
    assert (
        load_profile("local", [f"root={tmp_path}"]).tracking_uri
        == f"sqlite:///{tmp_path}/mlflow.db"
    )
    assert (
        load_profile("local", ["tracking.uri=http://127.0.0.1:5000"]).tracking_uri
        == "http://127.0.0.1:5000"
    )


def test_a_line_that_serves_its_own_model_serves_the_benchmarks_too() -> None:
    from flows.benchmark import synthesis_for

    served = load_profile(
        "paper",
        [
            "synthesis.sampler=vllm",
            "synthesis.server.tensor_parallel=4",
            "synthesis.server.args=[--seed, 1]",
        ],
    )
    for model in ("base", "tuned"):
        asked = synthesis_for(served, model)
        assert (asked.sampler, asked.model, asked.server) == (
            "vllm",
            "Qwen/QwQ-32B",
            served.synthesis.server,
        )
        assert asked.sampling == served.benchmark.sampling
    assert served.synthesis.server.args == (
        "--seed",
        "1",
    ), "as YAML has it, and as a command line wants it"
    assert synthesis_for(load_profile("paper"), "base").sampler == "transformers"
    assert synthesis_for(served, "recorded").sampler == "recorded"


def test_several_addresses_can_be_set() -> None:
    several = load_profile("paper", ["synthesis.base_url=[http://a/v1, http://b/v1]"])
    assert several.synthesis.base_url == ("http://a/v1", "http://b/v1")
    assert PipelineConfig.model_validate(several.model_dump(mode="json")) == several
