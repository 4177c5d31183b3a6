"""Held-out tasks are chosen by task, their loss is that of their completion tokens, and measuring
it changes nothing of the training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from tasks.publishing.shards import TEST, split_of
from tasks.sources.small_model import (
    SmallModelConfig,
    build_small_model,
    load_causal_model,
    load_tokenizer,
)
from tasks.training.evaluation import (
    EvaluationConfig,
    HeldOutLoss,
    attach,
    held_out_tasks,
    losses_of,
    split_by_task,
    stopped,
    stopped_at,
    with_held_out,
)
from tasks.training.formatting import label_mask, to_prompt_completion
from tests.support.training import plain_trainer

NAMES = st.lists(st.text(max_size=8), max_size=60)
CONFIGS = st.builds(
    EvaluationConfig,
    share=st.floats(0, 0.6),
    min_tasks=st.integers(1, 30),
    tasks=st.none() | st.integers(0, 5),
    seed=st.integers(0, 3),
)


# -- the split -------------------------------------------------------------------------------------


def chosen(names: list[str], config: EvaluationConfig) -> set[str] | None:
    try:
        return held_out_tasks(names, config)
    except UsageError:
        return None


@given(names=NAMES, config=CONFIGS)
def test_every_row_is_on_one_side_and_all_rows_of_a_task_on_the_same(
    names: list[str], config: EvaluationConfig
) -> None:
    rows = [{"task_id": name, "row": index} for index, name in enumerate(names)]
    if (held := chosen(names, config)) is None:
        with pytest.raises(UsageError, match="nothing is left"):
            split_by_task(rows, config)
        return
    training, held_out = split_by_task(rows, config)
    assert sorted(row["row"] for row in training + held_out) == list(range(len(rows)))
    assert {row["task_id"] for row in held_out} == held and {
        row["task_id"] for row in training
    } == set(names) - held
    assert all(side == sorted(side, key=lambda row: row["row"]) for side in (training, held_out)), (
        "in their order"
    )


@given(names=NAMES, config=CONFIGS, shuffled=st.randoms(use_true_random=False))
def test_order_and_repeats_do_not_matter(
    names: list[str], config: EvaluationConfig, shuffled: Any
) -> None:
    other = names + names[: len(names) // 2]
    shuffled.shuffle(other)
    assert chosen(other, config) == chosen(names, config)


@given(names=NAMES, more=NAMES, share=st.floats(0, 0.6), seed=st.integers(0, 3))
def test_more_tasks_move_none_across(
    names: list[str], more: list[str], share: float, seed: int
) -> None:
    config = EvaluationConfig(share=share, min_tasks=1, seed=seed)
    before, after = chosen(names, config), chosen(names + more, config)
    if before is not None and after is not None:
        assert after & set(names) == before


@given(
    names=st.sets(st.text(max_size=8), min_size=2, max_size=40),
    count=st.integers(0, 39),
    seed=st.integers(0, 3),
)
def test_a_number_of_tasks_is_that_number(names: set[str], count: int, seed: int) -> None:
    count = min(count, len(names) - 1)
    assert len(held_out_tasks(names, EvaluationConfig(tasks=count, seed=seed))) == count


@given(
    names=st.sets(st.text(max_size=8), min_size=1, max_size=40),
    share=st.floats(0.01, 0.6),
    seed=st.integers(0, 3),
)
def test_the_held_out_tasks_are_those_of_the_published_split(
    names: set[str], share: float, seed: int
) -> None:
    held = chosen(sorted(names), EvaluationConfig(share=share, min_tasks=1, seed=seed))
    assert held is None or held == {name for name in names if split_of(name, seed, share) == TEST}


def test_a_share_is_about_that_share_and_of_a_small_set_nothing() -> None:
    names = [f"kernelbook/{number}" for number in range(4000)]
    assert 60 <= len(held_out_tasks(names, EvaluationConfig())) <= 100, "2 % of 4,000 tasks"
    assert held_out_tasks(names[:19], EvaluationConfig(share=0.5)) == set()
    assert len(held_out_tasks(names[:20], EvaluationConfig(share=0.5))) > 0
    with pytest.raises(UsageError, match="takes all 3 tasks"):
        held_out_tasks(names[:3], EvaluationConfig(tasks=5))


# -- the loss --------------------------------------------------------------------------------------


WORDS = "walk over the rows four at a time and keep the sum in a register".split()


def rows(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """Rows of unequal length: a mean over rows and a mean over tokens differ."""
    return [
        {
            "candidate_id": f"c{n}",
            "task_id": f"t{n}",
            "reasoning": " ".join(WORDS[: 2 + 3 * n % 11] * (1 + n % 3)),
            "answer": f"x += {n};",
        }
        for n in range(offset, offset + count)
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = SmallModelConfig(
        vocab_size=600, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64
    )
    return build_small_model(
        tmp_path_factory.mktemp("models") / "small", [" ".join(WORDS), "x += 1;", "Task t1"], config
    )


@pytest.fixture(scope="module")
def examples(base: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """To train on, and held out."""
    tokenizer = load_tokenizer(base)
    found = to_prompt_completion(rows(9), tokenizer, lambda row: f"Task {row['task_id']}")
    return found[:6], found[6:]


Train = Callable[..., Any]


@pytest.fixture
def evaluated(base: Path, examples: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> Train:
    """Train, with dropout and a checkpoint each epoch, and evaluate on the held-out examples.
    Returns the trainer."""
    import torch

    def run(
        out: Path,
        held_out: list[dict[str, Any]] | None = None,
        *,
        resume: int | None = None,
        callbacks: Sequence[Any] = (),
        patience: int | None = None,
        rate: float = 5e-3,
    ) -> Any:
        tokenizer = load_tokenizer(base)
        trainer = plain_trainer(
            load_causal_model(base, dtype=torch.float32),
            [{side: example[side] for side in ("prompt", "completion")} for example in examples[0]],
            out,
            tokenizer,
            num_train_epochs=3,
            per_device_train_batch_size=2,
            learning_rate=rate,
            completion_only_loss=True,
            save_strategy="epoch",
            lora={"lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        )
        chosen = examples[1] if held_out is None else held_out
        attach(trainer, chosen, tokenizer, patience_epochs=patience)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{resume}") if resume else None)
        return trainer

    return run


def by_hand(model: Any, examples: list[dict[str, Any]], tokenizer: Any) -> float:
    """Mean over every completion token of the examples: what the hook has to log."""
    import torch

    total, count = 0.0, 0
    with torch.no_grad():
        for example in examples:
            mask = label_mask(example, tokenizer)
            said = torch.log_softmax(
                model(input_ids=torch.tensor([mask.input_ids])).logits[0].double(), -1
            )
            for position in range(1, len(mask.input_ids)):
                if mask.carries_loss[position]:
                    total -= float(said[position - 1, mask.input_ids[position]])
                    count += 1
    return total / count


def test_the_loss_is_of_held_out_completion_tokens_before_the_first_step_and_after_each_epoch(
    base: Path,
    examples: tuple[list[dict[str, Any]], list[dict[str, Any]]],
    evaluated: Train,
    tmp_path: Path,
) -> None:
    import torch
    from peft import PeftModel

    held_out, tokenizer = examples[1], load_tokenizer(base)
    untrained = by_hand(load_causal_model(base, dtype=torch.float32), held_out, tokenizer)
    losses = losses_of(evaluated(tmp_path).state.log_history)
    assert [(entry.step, entry.epoch) for entry in losses] == [(3 * n, float(n)) for n in range(4)]
    assert losses[0].loss == pytest.approx(untrained, rel=1e-5)
    for entry in losses[1:]:
        model = PeftModel.from_pretrained(
            load_causal_model(base, dtype=torch.float32), str(tmp_path / f"checkpoint-{entry.step}")
        ).eval()
        assert entry.loss == pytest.approx(by_hand(model, held_out, tokenizer), rel=1e-4)
    assert losses[-1].loss < losses[0].loss, "what it learns of some rows holds for the others"
    plain = load_causal_model(base, dtype=torch.float32)
    row_means = [by_hand(plain, [example], tokenizer) for example in held_out]
    mean = sum(row_means) / len(row_means)
    assert abs(mean - untrained) > 1e-4, "each token counts once, not each row"


def test_a_resumed_run_measures_what_an_uninterrupted_one_does_and_learns_the_same(
    evaluated: Train, tmp_path: Path
) -> None:
    import torch
    from transformers import TrainerCallback

    class PowerCut(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise ConnectionError

    whole = evaluated(tmp_path / "whole")
    with pytest.raises(ConnectionError):
        evaluated(tmp_path / "cut", callbacks=[PowerCut()])
    resumed = evaluated(tmp_path / "cut", resume=3)
    assert losses_of(resumed.state.log_history) == losses_of(whole.state.log_history)
    evaluations = [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry]
    assert evaluations == [0, 3, 6, 9], "what stands in the checkpoint is not measured again"
    mine, theirs = dict(resumed.model.named_parameters()), dict(whole.model.named_parameters())
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)

    # an epoch whose checkpoint came before its evaluation is measured on resuming
    written = tmp_path / "whole" / "checkpoint-6" / "trainer_state.json"
    state = json.loads(written.read_text())
    kept = [
        entry
        for entry in state["log_history"]
        if (entry["step"], "eval_loss" in entry) != (6, True)
    ]
    assert len(kept) == len(state["log_history"]) - 1
    written.write_text(json.dumps(state | {"log_history": kept}))
    again = evaluated(tmp_path / "whole", resume=6)
    assert losses_of(again.state.log_history) == losses_of(whole.state.log_history)

    # evaluation changes nothing of the training
    unmeasured = evaluated(tmp_path / "unmeasured", held_out=[])
    assert losses_of(unmeasured.state.log_history) == ()
    mine = dict(unmeasured.model.named_parameters())
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


# -- early stopping --------------------------------------------------------------------------------


def measured(*losses: float) -> list[HeldOutLoss]:
    return [
        HeldOutLoss(step=3 * epoch, epoch=epoch, loss=loss) for epoch, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "patience", "stops"),
    [
        ((2.0, 1.0, 1.5), None, False),
        ((2.0, 1.0), 1, False),
        ((2.0, 1.0, 1.0), 1, True),  # equal is no new lowest
        ((2.0, 1.0, 1.5), 2, False),
        ((2.0, 1.0, 1.5, 1.2), 2, True),
        ((2.0, 2.5), 1, True),  # worse than without training
        ((2.0, math.nan), 1, True),
        ((), 1, False),
    ],
)
def test_patience_counts_epochs_without_a_new_lowest_loss(
    losses: tuple[float, ...], patience: int | None, stops: bool
) -> None:
    assert stopped(measured(*losses), patience) is stops


def test_training_stops_early_only_where_it_is_asked_to_and_its_checkpoint_says_so(
    base: Path, evaluated: Train, tmp_path: Path
) -> None:
    # what training makes likelier comes at the expense of signs that it never sees
    row = {"candidate_id": "c", "task_id": "t", "reasoning": "%@! ?" * 40, "answer": "%@!"}
    held_out = to_prompt_completion(
        [row], load_tokenizer(base), lambda row: f"Task {row['task_id']}"
    )
    for patience, last in ((None, 9), (1, 3)):
        trainer = evaluated(tmp_path / str(patience), held_out, patience=patience, rate=3e-2)
        losses = losses_of(trainer.state.log_history)
        assert trainer.state.global_step == losses[-1].step == last
        assert losses[1].loss > losses[0].loss
    checkpoint = tmp_path / "1" / "checkpoint-3"
    assert (
        stopped_at(checkpoint, 1)
        and not stopped_at(checkpoint, 2)
        and not stopped_at(checkpoint, None)
    )
    assert not stopped_at(tmp_path / "nothing", 1)


# -- the log ---------------------------------------------------------------------------------------


def test_the_log_has_the_loss_in_the_rows_of_its_steps_and_a_row_before_the_first_step() -> None:
    history = [{"step": step, "epoch": step / 2, "loss": 3.0 - step} for step in (1, 2)]
    assert with_held_out(history, ()) == [{**entry, "held_out_loss": None} for entry in history]
    losses = [HeldOutLoss(step=0, epoch=0, loss=4.0), HeldOutLoss(step=2, epoch=1, loss=3.5)]
    assert with_held_out(history, losses) == [
        {"step": 0, "epoch": 0.0, "loss": None, "held_out_loss": 4.0},
        {"step": 1, "epoch": 0.5, "loss": 2.0, "held_out_loss": None},
        {"step": 2, "epoch": 1.0, "loss": 1.0, "held_out_loss": 3.5},
    ]
