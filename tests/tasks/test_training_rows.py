"""A training is addressed by its recipe and the rows it learns from: equal rows under two
strategies are one training."""

import json

import pytest

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.sandbox.trees import remove_tree
from tasks.progress import gathering
from tasks.store import ADAPTER, Snapshot
from tasks.tables import CURATED
from tasks.training import stage
from tasks.training.recipe import TrainingRecipe
from tasks.training.result import HISTORY
from tests.support.samples import finished
from tests.support.training import row

RECIPE = TrainingRecipe()
ROWS = [row(index) for index in range(4)]
PROMPTS = {each["task_id"]: each["prompt"] for each in ROWS}


def curated(root, strategy, rows):
    values = [{name: each.get(name) for name in CURATED.names} for each in rows]
    config = {"strategy": strategy}
    return finished(root, "curation", values, CURATED, strategy, config=config)


def finish(trained):
    trained.append([dict.fromkeys(HISTORY.names) | {"step": 1}], HISTORY, key="step")
    trained.local_dir("adapter")
    (trained.local_dir() / ADAPTER).touch()
    trained.publish(config=RECIPE)


def test_a_training_that_lost_its_adapter_is_trained_again_and_says_so(tmp_path, monkeypatch):
    first = curated(tmp_path, "concur", ROWS)
    trained = stage.planned(first, RECIPE, PROMPTS)
    finish(trained)
    remove_tree(trained.local_dir("adapter"))
    assert not trained.finished

    def ended(*_):
        raise EvalError("trained", "again")

    monkeypatch.setattr("tasks.training.launch.train_on_ray", ended)
    monkeypatch.setattr("kernels_eval.pool.ray.start_ray", lambda: None)
    with gathering() as told, pytest.raises(EvalError, match="trained"):
        stage.run(first, RECIPE, PROMPTS)
    assert told == [f"{trained.path} has lost its {ADAPTER}: it is trained again"]
    finish(trained)
    assert stage.run(first, RECIPE, PROMPTS) == trained.ref


def test_equal_rows_in_another_order_are_one_training_whose_manifest_names_the_first_set(tmp_path):
    first = curated(tmp_path, "concur", ROWS)
    second = curated(tmp_path, "random", ROWS[::-1])
    trained = stage.planned(first, RECIPE, PROMPTS)
    assert stage.planned(second, RECIPE, PROMPTS | {"other": "Another task"}) == trained
    finish(trained)
    assert stage.run(second, RECIPE, PROMPTS) == trained.ref, "nothing is trained again"
    manifest = json.loads((trained.local_dir() / "manifest.json").read_text())
    assert manifest["upstream"] == [first.fingerprint]


CHANGES = [
    {"candidate_id": "c9"},
    {"task_id": "t9"},
    {"reasoning": "another thought"},
    {"answer": "another answer"},
    {"finish_reason": "length"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_row_that_is_learned_otherwise_makes_another_training(tmp_path, change):
    prompts = PROMPTS | {"t9": PROMPTS["t0"]}
    plain = stage.planned(curated(tmp_path, "concur", ROWS), RECIPE, prompts)
    changed = curated(tmp_path, "changed", [ROWS[0] | change, *ROWS[1:]])
    assert stage.planned(changed, RECIPE, prompts) != plain


def test_the_prompt_of_a_row_and_the_number_of_rows_count(tmp_path):
    whole, part = curated(tmp_path, "concur", ROWS), curated(tmp_path, "part", ROWS[1:])
    trained = stage.planned(whole, RECIPE, PROMPTS)
    assert stage.planned(part, RECIPE, PROMPTS) != trained
    assert stage.planned(whole, RECIPE, PROMPTS | {"t0": "Write it in Triton"}) != trained
    ended = curated(tmp_path, "ended", [each | {"finish_reason": "stop"} for each in ROWS])
    assert stage.planned(ended, RECIPE, PROMPTS) == trained


def test_an_unfinished_or_empty_set_has_no_training(tmp_path):
    unfinished = Snapshot(str(tmp_path), "curation", "none").ref
    with pytest.raises(UsageError, match="it is unfinished"):
        stage.planned(unfinished, RECIPE, PROMPTS)
    with pytest.raises(UsageError, match="is empty"):
        stage.planned(curated(tmp_path, "empty", []), RECIPE, PROMPTS)
