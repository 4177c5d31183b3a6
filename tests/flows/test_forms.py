"""From a form to a configuration: what is left empty is the profile's, what cannot be used is one
sentence."""

import re
from operator import attrgetter

import pytest
from prefect.utilities.names import generate_slug
from pydantic import ValidationError

from flows.config import load_profile, profile_names
from flows.forms import (
    AdvancedForm,
    BenchmarkForm,
    CandidatesForm,
    ReinforcementForm,
    RunForm,
    SearchForm,
    StrategiesForm,
    TrainingForm,
    TrainingSetForm,
    configuration,
)
from flows.naming import is_generated, run_name, submitted_name, typed_name
from kernels_eval.errors import UsageError
from kernels_eval.installation import ROOT_VARIABLE


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in (ROOT_VARIABLE, "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def test_an_empty_form_is_the_profile(tmp_path):
    forms = (CandidatesForm(), TrainingSetForm(), TrainingForm(), ReinforcementForm())
    for profile in ("local", "nightly", "paper"):
        run = RunForm(profile=profile, root=str(tmp_path))
        assert configuration(run, *forms, BenchmarkForm()) == load_profile(
            profile, (f"root={tmp_path}",)
        )


def test_every_field_reaches_its_key(tmp_path):
    """Each field of each form, typed as a person does; an override wins over a field."""
    run = RunForm(profile="local", root=str(tmp_path), name="1: mine")
    filled = {
        CandidatesForm(
            source="kernelbook",
            location="mine/tasks",
            sampler="openai",
            model="qwen",
            endpoint="http://host:8000/v1",
            tasks=3,
            samples_per_task=2,
        ): "3 2 kernelbook mine/tasks openai qwen http://host:8000/v1",
        TrainingSetForm(strategy="random", size=7): "random 8",
        TrainingForm(base_model="no", epochs=2, workers=1): "no 2 1",
        ReinforcementForm(
            reward="kevin", steps=5, tasks_per_step=2, samples_per_task=4
        ): "kevin 5 2 4",
        BenchmarkForm(samples_per_task=4): "4",
    }
    advanced = AdvancedForm(overrides=["verification.workers=2", "curation.size=8"])
    found = configuration(run, *filled, advanced=advanced)
    # text that YAML would read as something else stays text
    assert (found.name, found.root, found.verification.workers) == ("1: mine", str(tmp_path), 2)
    for form, values in filled.items():
        keys = [field.json_schema_extra["key"] for field in type(form).model_fields.values()]
        assert " ".join(str(attrgetter(key)(found)) for key in keys) == values
    with pytest.raises(ValidationError, match="is not one of"):
        CandidatesForm(source="kernelbok")


@pytest.mark.parametrize(
    "run, overrides, expected",
    [
        ({"profile": "local"}, [], "refresh local"),
        ({"profile": "local", "name": "mine"}, ["curation.size=8"], "refresh mine"),
        ({"profile": "local", "name": "mine"}, ["name=theirs"], "refresh theirs"),
    ],
)
def test_a_flow_run_has_the_name_that_its_form_gives(run, overrides, expected, monkeypatch):
    given = {"run": RunForm(**run), "advanced": AdvancedForm(overrides=overrides)}
    monkeypatch.setattr("prefect.runtime.flow_run.parameters", given, raising=False)
    monkeypatch.setattr("prefect.runtime.flow_run.name", "jasper-cuttlefish", raising=False)
    assert run_name("refresh")() == expected
    assert typed_name() == ""
    monkeypatch.setattr("prefect.runtime.flow_run.name", expected, raising=False)
    assert typed_name() == "", "the name that the run was given"
    monkeypatch.setattr("prefect.runtime.deployment.id", "of a form", raising=False)
    monkeypatch.setattr("prefect.runtime.flow_run.name", "psi6-beltane", raising=False)
    submitted = f"{expected} psi6-beltane"
    assert run_name("refresh")() == submitted and typed_name() == ""
    monkeypatch.setattr("prefect.runtime.flow_run.name", submitted, raising=False)
    assert run_name("refresh")() == submitted and typed_name() == "", "when it is retried"
    assert submitted_name() == "psi6-beltane", "which MLflow's run has, too"
    monkeypatch.setattr("prefect.runtime.flow_run.name", "tonight", raising=False)
    assert run_name("refresh")() == typed_name() == "tonight"


def test_only_a_name_that_prefect_made_up_is_replaced():
    """Its server's, and those that its two forms show before anybody types."""
    of_server = [generate_slug(2) for _ in range(500)]
    of_forms = ["delta712-janus-collapse", "mu3-canis-majoris", "xi-velorum-ring"]
    of_forms += ["Incredible-Olingo", "Small-Ant", "Tasty-Emu"]
    assert [name for name in of_server + of_forms if not is_generated(name)] == []
    typed = ["tonight", "my-run", "beta-run", "qwq-32b", "small-run", "try 2", "refresh local", ""]
    assert [name for name in typed if is_generated(name)] == []


def test_a_hint_is_true_of_whichever_profile_is_chosen():
    """A form cannot know the choice above a field: its hint tells every profile's value, or none
    where each has its own."""
    hints = {
        field.json_schema_extra["key"]: field.description
        for form in (RunForm, CandidatesForm, TrainingSetForm, TrainingForm, BenchmarkForm)
        for field in form.model_fields.values()
        if field.json_schema_extra
    }
    assert hints.pop("name").endswith("Empty: as the profile says.")
    unset = {
        "tasks.limit": "all",
        "tasks.location": "the source's own",
        "synthesis.model": "none, answers are recorded",
        "synthesis.base_url": "none",
        "curation.size": "what the strategy takes",
    }
    for key, hint in hints.items():
        usual, *others = re.search(r"as the profile says \((.*)\)\.$", hint)[1].split("; ")
        told = {name: value for each in others for name, _, value in [each.partition(": ")]}
        for name in profile_names():
            value = attrgetter(key)(load_profile(name))
            assert told.get(name, usual) == (unset[key] if value is None else str(value)), hint
    assert hints["training.workers"].endswith("(1; paper: 8).")


def test_a_hint_has_one_word_for_what_nothing_entered_means():
    forms = [SearchForm, ReinforcementForm, CandidatesForm, TrainingSetForm, TrainingForm]
    fields = [field for form in forms for field in form.model_fields.values()]
    for hint in (field.description for field in fields):
        assert len(re.findall(r"(?i)\b(0|empty|left alone): ", hint)) == 1, hint
        assert not re.search(r"(?i)not set|left out|null|controls?\b", hint), hint


def test_own_profiles_are_chosen_like_those_that_ship(tmp_path, monkeypatch):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.yaml").write_text("name: mine\nlanguage: cpp\n")
    assert "mine" not in profile_names()
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    assert {"mine", "nightly"} <= set(profile_names())
    assert load_profile("mine").name == "mine"


def test_the_root_is_the_forms_else_the_workers_else_an_override(tmp_path, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "worker"))
    assert configuration(RunForm()).root == str(tmp_path / "worker")
    assert configuration(RunForm(root="s3://bucket/concur")).root == "s3://bucket/concur"
    assert configuration(
        RunForm(), advanced=AdvancedForm(overrides=[f"root={tmp_path}"])
    ).root == str(tmp_path)


def test_a_relative_root_is_refused_because_it_would_be_removed_with_the_run():
    with pytest.raises(UsageError, match="relative.*temporary") as raised:
        configuration(RunForm())
    assert ROOT_VARIABLE in str(raised.value)


def test_mlflow_is_where_the_worker_says_unless_the_configuration_names_it(tmp_path, monkeypatch):
    run = RunForm(root=str(tmp_path))
    assert configuration(run).tracking.uri is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert configuration(run).tracking_uri == "http://127.0.0.1:5000"
    assert (
        configuration(
            run, advanced=AdvancedForm(overrides=["tracking.uri=http://other:1"])
        ).tracking_uri
        == "http://other:1"
    )


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["verification.worker=2"], "did you mean verification.workers"),
        (["verification.workers=0"], "greater than 0"),
        (["nonsense"], "is not key=value"),
        (["training.workers=3"], "cannot be shared among 3 workers"),
        (["reinforcement.samples_per_task=1"], "samples_per_task = 1: .*equal to 2"),
        (
            ["reinforcement.samples_per_task=3", "reinforcement.batch_size=16"],
            "batch_size 16 does not div",
        ),
    ],
)
def test_what_cannot_be_used_is_one_sentence(overrides, said, tmp_path):
    with pytest.raises(UsageError, match=said) as raised:
        configuration(RunForm(root=str(tmp_path)), advanced=AdvancedForm(overrides=overrides))
    assert "\n" not in str(raised.value).strip()


@pytest.mark.parametrize(
    "form, fields",
    [
        (RunForm, {"profile": "nowhere"}),
        (CandidatesForm, {"samples_per_task": -1}),
        (TrainingSetForm, {"strategy": "best"}),
        (StrategiesForm, {"strategies": []}),
        (ReinforcementForm, {"reward": "allclose"}),
        (RunForm, {"rooot": "/x"}),
    ],
)
def test_a_form_refuses_what_prefect_would_let_pass(form, fields):
    with pytest.raises(ValidationError):
        form(**fields)
