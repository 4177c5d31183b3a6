"""Profiles: every one that ships loads, and every way to write one wrongly is one line that names
the key and the fix."""

from operator import attrgetter
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from flows.benchmark import synthesis_for
from flows.config import PipelineConfig, load_profile, profile_names, shipped_dir
from kernels_eval.errors import UsageError
from tests.support.cases import cases

CASES = cases("config")

MOST_KEYS = 148
SHIPPED = sorted(shipped_dir("profiles").glob("*.yaml"))


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(profile, *overrides):
    with pytest.raises(UsageError) as caught:
        load_profile(profile, overrides)
    return caught.value


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_profile_loads_by_name_and_by_path(path):
    by_name = load_profile(path.stem)
    assert by_name == load_profile(str(path))
    assert by_name.name == path.stem  # run names say which profile it was
    assert (
        PipelineConfig.model_validate(by_name.model_dump(mode="json")) == by_name
    )  # what Prefect stores and reads back


def test_the_profiles_are_those_that_the_docs_name():
    assert profile_names() == [path.stem for path in SHIPPED]
    assert set(profile_names()) >= {"local", "paper", "nightly", "cuda"}


@pytest.mark.parametrize("profile, key, value", CASES["profiles"])
def test_a_profile_holds_what_its_page_says(profile, key, value):
    """The paper's numbers: ConCuR (arXiv 2510.07356), section 3 for the data, the training setup
    for the recipe. The embedded profiles need neither GPU nor network."""
    found = attrgetter(key)(load_profile(profile))
    assert (list(found) if isinstance(found, tuple) else found) == value


def test_the_cuda_profile_differs_from_local_in_language_only_where_it_matters():
    cuda, local = load_profile("cuda"), load_profile("local")
    assert cuda.language.needs_gpu and not local.language.needs_gpu
    for name in ("synthesis", "curation"):
        assert getattr(cuda, name) == getattr(local, name)
    # the pairs that the pretrained model knows are in C++
    apart = {"tasks": {"split"}, "training": {"base_model", "max_length", "batch_size"}}
    for name, keys in apart.items():
        own, other = (getattr(each, name).model_dump(exclude=keys) for each in (cuda, local))
        assert own == other
    assert cuda.benchmark.samples_per_task == local.benchmark.samples_per_task


def test_what_an_adapter_is_is_the_papers_in_every_profile():
    lora = attrgetter("lora_rank", "lora_dropout", "num_epochs")
    for config in (PipelineConfig(), *map(load_profile, profile_names())):
        assert lora(config.training) == (32, 0.05, 3)


@pytest.mark.parametrize(
    "override, value",
    CASES["an_override_reaches_every_depth_and_is_yaml"],
)
def test_an_override_reaches_every_depth_and_is_yaml(override, value):
    config = load_profile("paper", [override])
    found = attrgetter(override.partition("=")[0])(config)
    assert (list(found) if isinstance(found, tuple) else found) == value
    assert PipelineConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_mapping_replaces_a_mapping_and_the_last_override_wins(tmp_path):
    config = load_profile("ablation", ["benchmark.sampling={temperature: 0.1}"])
    sampling = config.benchmark.sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.1, 160)  # the small model's own again
    assert config.training == load_profile("ablation").training
    twice = ["synthesis.samples_per_task=2", "synthesis.samples_per_task=4"]
    assert load_profile("local", twice).synthesis.samples_per_task == 4
    bare = load_profile(written(tmp_path, "name: bare\n"), ["tracking.experiment=try"])
    assert bare.tracking.experiment == "try"  # a section that the profile leaves out


def test_values_are_set_before_overrides_and_are_taken_as_they_are():
    config = load_profile("local", ["curation.size=8"], {"name": "1: no", "curation.size": 7})
    assert (config.name, config.curation.size) == ("1: no", 8)


def test_an_empty_profile_is_the_defaults(tmp_path):
    assert load_profile(written(tmp_path, "# nothing yet\n")) == PipelineConfig()


def test_a_configuration_cannot_be_changed_after_it_was_read():
    config = load_profile("local")
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        config.training.lora_rank = 8


@pytest.mark.parametrize(
    "override, key, nearest",
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
            "known keys here: code_column, levels, limit, location, options, precision,"
            " revision, source, split",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(override, key, nearest):
    error = refusal("local", override)
    assert repr(key) in error.args[0] and error.hint == nearest


@pytest.mark.parametrize(
    "override, key, shown, why",
    CASES["a_wrong_type_or_a_value_out_of_range_says_key_value_and_rule"],
)
def test_a_wrong_type_or_a_value_out_of_range_says_key_value_and_rule(override, key, shown, why):
    error = refusal("local", override)
    assert f"{key} = {shown}" in error.args[0] and why in error.args[0] and "--set" in error.hint


@pytest.mark.parametrize(
    "override, part",
    [
        ("verification.workers", "not key=value"),
        ("=3", "not key=value"),
        ("name=[1,", "not YAML"),
        ("root.deeper=1", "root is a value"),
    ],
)
def test_an_override_that_cannot_be_read(override, part):
    assert part in str(refusal("local", override))


def test_a_missing_profile_names_the_nearest_or_lists_them():
    assert refusal("locale").hint == "did you mean local?"
    assert all(name in refusal("qqq").hint for name in profile_names())


@pytest.mark.parametrize(
    "content, part",
    [
        (b"name: [1, 2\nroot: here\n", "is not YAML: line"),
        (b"- a\n- b\n", "is a list, not a mapping"),
        (b"just words\n", "is a str, not a mapping"),
        (b"a: b: c\n", "is not YAML: line 1"),
        (b"\xff\xfe\x00name", "is not YAML"),
        (None, "there is no profile"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path, content, part):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_bytes(content)
    assert part in str(refusal(str(path))) and "mine.yaml" in str(refusal(str(path)))


def test_a_directory_in_place_of_a_profile(tmp_path):
    assert "cannot read profile" in str(refusal(f"{tmp_path}/"))


def test_tracking_goes_to_the_root_unless_said_otherwise(tmp_path):
    found = load_profile("local", [f"root={tmp_path}"]).tracking_uri
    assert found == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_line_that_serves_its_own_model_serves_the_benchmarks_too():
    overrides = ["synthesis.sampler=vllm", "synthesis.server.tensor_parallel=4"]
    served = load_profile("paper", overrides)
    for model in ("base", "tuned"):
        asked = synthesis_for(served, model)
        assert (asked.sampler, asked.model) == ("vllm", "Qwen/QwQ-32B")
        assert asked.server == served.synthesis.server
        assert asked.sampling == served.benchmark.sampling
    assert synthesis_for(load_profile("paper"), "base").sampler == "transformers"
    assert synthesis_for(served, "recorded").sampler == "recorded"


def keys_of(model, found):
    """Every key of a profile once: the class that has it, its name, and what describes it."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for group in groups:
            keys_of(group, found)
        if not groups:
            found[model.__name__, name] = field.description or f"{model.__doc__}"
    return found


def test_a_profile_has_few_keys_and_each_is_described():
    """A number that no profile, page or test sets is a constant beside its use."""
    found = keys_of(PipelineConfig, {})
    assert len(found) <= MOST_KEYS, len(found)
    missing = [key for key, text in found.items() if not text or text == "None"]
    assert missing == []
