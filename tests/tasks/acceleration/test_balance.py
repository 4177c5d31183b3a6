"""Steps of rows of like length: the epoch's gradient is that of any order, a resumed run is exact,
and several workers take the steps of one."""

import shutil

import pytest
import torch
from transformers import TrainerCallback

from tasks.models import load_tokenizer
from tasks.training.formatting import examples_of
from tasks.training.recipe import TrainingRecipe
from tasks.training.trainer import LoraTrainer, train
from tests.support.training import REASONING, adapter_bytes, row

# from 1 to 12 times as long, in an order of no meaning
ROWS = [row(index, reasoning=REASONING * (1 + index * 5 % 12)) for index in range(12)]
RECIPE = TrainingRecipe(
    gradient_accumulation=2,
    num_epochs=2,
    learning_rate=5e-3,
    row_order="balanced",
    checkpoint_every_steps=1,
    max_length=4096,
)


class Gradients(TrainerCallback):
    """The sum over all steps, by name."""

    def __init__(self):
        self.total = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.total[name] = self.total.get(name, 0) + parameter.grad.clone()


def one_epoch(base, out, **changes):
    """Gradients, and (loss, tokens with loss) by step, of weights that do not move."""
    still = {"num_epochs": 1, "learning_rate": 1e-12, "lora_dropout": 0.0}
    recipe = RECIPE.model_copy(update=still | changes).resolve(gpu=False)
    tokenizer = load_tokenizer(base)
    examples = examples_of(ROWS, tokenizer)
    row_lengths = [example.tokens for example in examples]
    made = LoraTrainer(recipe, base, out, tokenizer, examples)
    made.args.max_grad_norm = 0.0
    told = made.accelerate().batches
    gradients, tokens = Gradients(), []
    count = made.get_batch_samples

    def counted(*args):
        batches, divisor = count(*args)
        lengths = [int(n) for b in batches for n in b["attention_mask"].sum(1)]
        tokens.append((sum(int((b["labels"] != -100).sum()) for b in batches), lengths))
        return batches, divisor

    made.get_batch_samples = counted
    made.add_callback(gradients)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert len(losses) == len(tokens)
    return gradients.total, losses, tokens, told, sorted(row_lengths)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """All rows as one step: each token of the epoch weighs the same."""
    out = tmp_path_factory.mktemp("whole")
    return one_epoch(base, out, gradient_accumulation=12, row_order="random")


def difference(ours, theirs, steps):
    scale = max(float(wanted.abs().max()) for wanted in theirs.values())
    gaps = (ours[name] / steps - wanted for name, wanted in theirs.items())
    return max(float(gap.abs().max()) for gap in gaps) / scale


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_epochs_gradient_is_that_of_all_its_rows_and_losses_are_means_over_tokens(
    base, tmp_path, whole, batch_size
):
    shape = {"batch_size": batch_size, "gradient_accumulation": 2 // batch_size}
    gradients, losses, steps, told, lengths = one_epoch(base, tmp_path, **shape)
    assert sorted(length for _, rows in steps for length in rows) == lengths, "each row once"
    assert difference(gradients, whole[0], steps=6) < 1e-4
    # and what is logged is the mean over the step's own tokens
    total = sum(loss * tokens for loss, (tokens, _) in zip(losses, steps, strict=True))
    assert total / sum(tokens for tokens, _ in steps) == pytest.approx(whole[1][0], rel=1e-5)
    assert told["rows_mean"] == 2 and (batch_size > 1 or told["busy_share"] == 1)


def test_rows_of_a_step_are_of_like_length(base, tmp_path):
    _, _, steps, _, lengths = one_epoch(base, tmp_path)
    pairs = sorted(sorted(rows) for _, rows in steps)
    assert pairs == [lengths[start : start + 2] for start in range(0, 12, 2)]


@pytest.mark.slow
def test_without_the_weight_short_rows_would_count_for_more(base, tmp_path, whole, monkeypatch):
    monkeypatch.setattr(torch, "full_like", lambda tokens, *_, **__: tokens)
    gradients, *_ = one_epoch(base, tmp_path)
    assert difference(gradients, whole[0], steps=6) > 1e-2


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_order_to_the_last_bit(base, tmp_path):
    uninterrupted = train(ROWS, RECIPE, base, tmp_path)
    shutil.rmtree(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-12")
    resumed = train(ROWS, RECIPE, base, tmp_path)
    assert resumed.resumed_from_step == 11, "amid the second epoch"
    assert resumed.history == uninterrupted.history
    assert adapter_bytes(resumed) == adapter_bytes(uninterrupted)
