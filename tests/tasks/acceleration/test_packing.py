"""Lines of packed rows in a trainer: the gradient is that of the unpacked rows, plans are followed,
a resumed run goes on in them."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tasks.training.acceleration.batching import plan_epochs
from tasks.training.acceleration.layers import AccelerationOptions, accelerate
from tasks.training.acceleration.packing import pack, use_lines
from tasks.training.recipe import PROJECTIONS
from tests.support.training import plain_trainer

BUDGET, VOCABULARY = 48, 64


def rows(count=11):
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        ids = torch.randint(2, VOCABULARY, (6 + 5 * index % 31,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100] * 3 + ids[3:]})
    return made


LENGTHS = [len(row["input_ids"]) for row in rows()]


def plans(epochs):
    return plan_epochs(LENGTHS, token_budget=BUDGET, epochs=epochs, seed=0, window_rows=64)


def trainer(folder, *, accumulation, epochs=2, dropout=0.0, packed=True, rate=1e-2):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, "a")),
        eos_token="<end>",
        pad_token="<end>",
    )
    made = plain_trainer(
        Qwen2ForCausalLM(config),
        rows(),
        folder,
        tokenizer,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
        learning_rate=rate,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        save_strategy="steps",
        save_steps=1,
        seed=0,
        optim="sgd",
        lora={"lora_alpha": 4, "lora_dropout": dropout, "target_modules": list(PROJECTIONS)},
    )
    if packed:
        use_lines(made, plans(epochs), token_budget=BUDGET, multiple=16)
    acceleration = accelerate(
        made.model, tokens=BUDGET, seed=0, options=AccelerationOptions(compile=False)
    )
    made.add_callback(acceleration.callback())
    return made


def adapter(made):
    return {
        name: parameter.detach().clone()
        for name, parameter in made.model.named_parameters()
        if parameter.requires_grad
    }


def test_one_step_over_packed_rows_is_one_step_over_the_rows_alone(tmp_path):
    """Plain gradient descent over one whole epoch as one optimiser step: the change of every weight
    is the gradient."""
    changed = {}
    for packed in (False, True):
        made = trainer(tmp_path / str(packed), accumulation=100, epochs=1, packed=packed)
        made.train()
        assert made.state.global_step == 1
        changed[packed] = adapter(made)
    start = adapter(trainer(tmp_path / "start", accumulation=100))
    for name, theirs in changed[False].items():
        step = (theirs - start[name]).abs().max()
        assert (changed[True][name] - theirs).abs().max() <= 1e-4 * step + 1e-9, name
    assert any(
        (theirs - start[name]).abs().max() > 1e-6 for name, theirs in changed[False].items()
    ), "something was learned"


def seen(made):
    """First token, length of every line that the trainer trains on."""
    lines = []
    collate = made.data_collator

    def recording(batch):
        lines.append([len(example["input_ids"]) for example in batch[0]])
        return collate(batch)

    made.data_collator = recording
    return lines


@pytest.mark.parametrize("accumulation", [1, 4])  # with 4 the last step of an epoch is short
def test_plans_are_followed_and_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path, accumulation):
    whole = trainer(tmp_path / "whole", accumulation=accumulation, dropout=0.2)
    lines = seen(whole)
    whole.train()
    half = len(lines) // 2
    for plan, part in zip(plans(2), (lines[:half], lines[half:]), strict=True):
        assert part == [[LENGTHS[row] for row in line] for line in plan]
    assert accumulation == 1 or half % accumulation, "an epoch's last step is short"
    stop = whole.state.global_step - 1  # in the second epoch
    resumed = trainer(tmp_path / "resumed", accumulation=accumulation, dropout=0.2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    for name, theirs in adapter(whole).items():
        assert torch.equal(adapter(resumed)[name], theirs), name
    assert [entry["loss"] for entry in resumed.state.log_history if "loss" in entry] == [
        entry["loss"] for entry in whole.state.log_history if "loss" in entry
    ]


def test_evaluation_rows_keep_their_collator_and_their_loss(tmp_path):
    made = trainer(tmp_path, accumulation=1, epochs=1)
    held_out = Dataset.from_list(rows()[:3])
    packed = made.evaluate(held_out)["eval_loss"]
    alone = trainer(tmp_path, accumulation=1, epochs=1, packed=False).evaluate(held_out)[
        "eval_loss"
    ]
    assert packed == pytest.approx(alone, rel=1e-6)


def test_the_first_token_of_a_row_and_padding_carry_no_loss():
    line = pack(
        [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}],
        padded_tokens=8,
    )
    assert line["labels"].tolist() == [[-100, 6, -100, 8, 9, -100, -100, -100]]
    assert line["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert line["cu_documents"].tolist() == [0, 2, 5, 8, 8, 8, 8, 8]


def test_a_line_of_one_row_needs_no_bounds():
    assert "cu_documents" not in pack(
        [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}], padded_tokens=5
    )


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 tokens do not make a line of 2"):
        pack([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], padded_tokens=2)
    made = trainer(tmp_path, accumulation=1, packed=False)
    other = plan_epochs([3, 4], token_budget=8, epochs=1, seed=0)
    for given, batch_size, said in (
        (other, 1, "the plans hold 2 rows, the trainer 11"),
        (plans(1), 2, "set the trainer's batch size to 1"),
    ):
        made.args.per_device_train_batch_size = batch_size
        with pytest.raises(ValueError, match=said):
            use_lines(made, given, token_budget=BUDGET, multiple=4)
