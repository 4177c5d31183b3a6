"""Held-out tasks are chosen by task, their loss is that of their completion tokens, and measuring
it changes nothing of the training."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from tasks.models import load_causal_model, load_tokenizer
from tasks.publishing.config import TEST
from tasks.publishing.rows import split_of
from tasks.training import trainer_settings
from tasks.training.evaluation import LEAST_TASKS, held_out_tasks, split_by_task
from tasks.training.formatting import IGNORED, examples_of
from tasks.training.recipe import FIXED, TrainingRecipe
from tasks.training.result import HELD_OUT, HISTORY, training_log
from tasks.training.trainer import LoraTrainer
from tests.support.cases import cases

CASES = cases("training")

NAMES = st.lists(st.text(max_size=8), max_size=60)
ENOUGH = st.sets(st.text(max_size=8), min_size=LEAST_TASKS, max_size=60)
HELD_OUT_OF = st.floats(0, 0.6) | st.integers(1, 5)


# -- the split -------------------------------------------------------------------------------------


def chosen(names, asked):
    try:
        return held_out_tasks(names, asked)
    except UsageError:
        return None


@given(names=NAMES, asked=HELD_OUT_OF)
def test_every_row_is_on_one_side_and_all_rows_of_a_task_on_the_same(names, asked):
    rows = [{"task_id": name, "row": index} for index, name in enumerate(names)]
    if (held := chosen(names, asked)) is None:
        with pytest.raises(UsageError, match="nothing is left"):
            split_by_task(rows, asked)
        return
    training, held_out = split_by_task(rows, asked)
    assert sorted(row["row"] for row in training + held_out) == list(range(len(rows)))
    assert {row["task_id"] for row in held_out} == held
    assert {row["task_id"] for row in training} == set(names) - held
    assert all(side == sorted(side, key=lambda row: row["row"]) for side in (training, held_out)), (
        "in their order"
    )


@given(names=NAMES, asked=HELD_OUT_OF, shuffled=st.randoms(use_true_random=False))
def test_order_and_repeats_do_not_matter(names, asked, shuffled):
    other = names + names[: len(names) // 2]
    shuffled.shuffle(other)
    assert chosen(other, asked) == chosen(names, asked)


@given(names=ENOUGH, more=NAMES, share=st.floats(0, 0.6))
def test_more_tasks_move_none_across(names, more, share):
    before, after = chosen(names, share), chosen([*names, *more], share)
    if before is not None and after is not None:
        assert after & names == before


@given(
    names=st.sets(st.text(max_size=8), min_size=2, max_size=40),
    count=st.integers(1, 39),
)
def test_a_number_of_tasks_is_that_number(names, count):
    count = min(count, len(names) - 1)
    assert len(held_out_tasks(names, count)) == count


@given(names=ENOUGH, share=st.floats(0.01, 0.6))
def test_the_held_out_tasks_are_those_of_the_published_split(names, share):
    held = chosen(sorted(names), share)
    assert held is None or held == {name for name in names if split_of(name, share) == TEST}


def test_a_share_is_about_that_share_and_of_a_small_set_nothing():
    names = [f"kernelbook/{number}" for number in range(4000)]
    assert 60 <= len(held_out_tasks(names, TrainingRecipe().held_out)) <= 100, "2 % of 4,000 tasks"
    assert held_out_tasks(names[:19], 0.5) == set()
    assert len(held_out_tasks(names[:20], 0.5)) > 0
    with pytest.raises(UsageError, match="takes all 3 tasks"):
        held_out_tasks(names[:3], 5)


# -- the loss --------------------------------------------------------------------------------------


WORDS = "walk over the rows four at a time and keep the sum in a register".split()


def rows(count, offset=0):
    """Rows of unequal length: a mean over rows and a mean over tokens differ."""
    return [
        {
            "candidate_id": f"c{n}",
            "task_id": f"t{n}",
            "prompt": f"Task t{n}",
            "reasoning": " ".join(WORDS[: 2 + 3 * n % 11] * (1 + n % 3)),
            "answer": f"x += {n};",
        }
        for n in range(offset, offset + count)
    ]


@pytest.fixture(scope="module")
def examples(base):
    """To train on, and held out."""
    found = examples_of(rows(9), load_tokenizer(base))
    return found[:6], found[6:]


Train = Callable[..., Any]


@pytest.fixture
def evaluated(base, examples, monkeypatch):
    """Train, with dropout and a checkpoint each epoch, and evaluate on the held-out examples.
    Returns the trainer."""

    steady = FIXED.model_copy(update={"lr_schedule": "linear", "warmup_share": 0.0})
    monkeypatch.setattr(trainer_settings, "FIXED", steady)

    def run(out, held_out=None, *, resume=None, callbacks=(), rate=5e-3):
        recipe = TrainingRecipe(
            batch_size=2,
            gradient_accumulation=1,
            learning_rate=rate,
            lora_rank=4,
        )
        chosen = examples[1] if held_out is None else held_out
        trainer = LoraTrainer(
            recipe.resolve(gpu=False), base, out, load_tokenizer(base), examples[0], chosen
        )
        trainer.args.save_total_limit = None
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(str(checkpoint(out, resume)) if resume else None)
        return trainer

    return run


def checkpoint(out, step):
    return out / "checkpoints" / f"checkpoint-{step}"


def losses_of(trainer):
    """Step, epoch and held-out loss."""
    log = training_log(trainer.state.log_history)
    return [(row["step"], row["epoch"], row[HELD_OUT]) for row in log if row[HELD_OUT] is not None]


def by_hand(model, examples):
    """Mean over every completion token of the examples: what the hook has to log."""
    import torch

    total, count = 0.0, 0
    with torch.no_grad():
        for example in examples:
            logits = model(input_ids=torch.tensor([list(example.input_ids)])).logits[0]
            said = torch.log_softmax(logits.double(), -1)
            for position, label in enumerate(example.labels):
                if label != IGNORED:
                    total -= float(said[position - 1, label])
                    count += 1
    return total / count


@pytest.mark.slow
def test_the_loss_is_of_held_out_completion_tokens_before_the_first_step_and_after_each_epoch(
    base, examples, evaluated, tmp_path
):
    import torch
    from peft import PeftModel

    held_out = examples[1]
    untrained = by_hand(load_causal_model(base, dtype=torch.float32), held_out)
    losses = losses_of(evaluated(tmp_path))
    assert [entry[:2] for entry in losses] == [(3 * n, float(n)) for n in range(4)]
    assert losses[0][2] == pytest.approx(untrained, rel=1e-5)
    for step, _, loss in losses[1:]:
        model = PeftModel.from_pretrained(
            load_causal_model(base, dtype=torch.float32), str(checkpoint(tmp_path, step))
        ).eval()
        assert loss == pytest.approx(by_hand(model, held_out), rel=1e-4)
    assert losses[-1][2] < losses[0][2], "what it learns of some rows holds for the others"
    plain = load_causal_model(base, dtype=torch.float32)
    row_means = [by_hand(plain, [example]) for example in held_out]
    mean = sum(row_means) / len(row_means)
    assert abs(mean - untrained) > 1e-4, "each token counts once, not each row"


@pytest.mark.slow
def test_a_resumed_run_measures_what_an_uninterrupted_one_does_and_learns_the_same(
    evaluated, tmp_path
):
    import torch
    from transformers import TrainerCallback

    class PowerCut(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise ConnectionError

    whole = evaluated(tmp_path / "whole")
    with pytest.raises(ConnectionError):
        evaluated(tmp_path / "cut", callbacks=[PowerCut()])
    resumed = evaluated(tmp_path / "cut", resume=3)
    assert losses_of(resumed) == losses_of(whole)
    evaluations = [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry]
    assert evaluations == [0, 3, 6, 9], "what stands in the checkpoint is not measured again"
    mine, theirs = dict(resumed.model.named_parameters()), dict(whole.model.named_parameters())
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)

    # evaluation changes nothing of the training
    unmeasured = evaluated(tmp_path / "unmeasured", held_out=[])
    assert losses_of(unmeasured) == []
    mine = dict(unmeasured.model.named_parameters())
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


# -- the log ---------------------------------------------------------------------------------------


def test_the_log_has_the_loss_in_the_rows_of_its_steps_and_a_row_before_the_first_step():
    steps = [{"step": step, "epoch": step / 2, "loss": 3.0 - step} for step in (1, 2)]
    measured = CASES["evaluations"]
    twice = {"step": 2, "epoch": 1, "eval_loss": 9.0}
    summary = {"step": 2, "train_loss": 1.5}
    empty = dict.fromkeys(HISTORY.names)
    first, second = ({**empty, **entry} for entry in steps)
    assert training_log([*steps, summary]) == [first, second]
    assert training_log([measured[0], *steps, measured[1], twice, summary]) == [
        empty | {"step": 0, "epoch": 0.0, HELD_OUT: 4.0},
        first,
        second | {HELD_OUT: 3},
    ]
