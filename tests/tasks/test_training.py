"""Reasoning carries loss, nothing is truncated, an interrupted run continues where it stopped, and
the adapter on disk does something."""

import json
import shutil

import pytest
from tokenizers.processors import TemplateProcessing

from kernels_eval.errors import EvalError, UsageError
from tasks.models import load_tokenizer
from tasks.training.adapter import check_adapter
from tasks.training.faults import is_out_of_memory
from tasks.training.formatting import examples_of, select_examples
from tasks.training.launch import train_on_ray
from tasks.training.recipe import PROJECTIONS, TrainingRecipe
from tasks.training.trainer import LoraTrainer, train
from tests.support.training import REASONING, adapter_bytes, adapter_changes_output, row

RECIPE = TrainingRecipe(gradient_accumulation=2, learning_rate=5e-3)


@pytest.fixture(scope="module")
def rows():
    return [row(index) for index in range(6)]


@pytest.fixture(scope="module")
def trained(base, rows, tmp_path_factory):
    return train(rows, RECIPE, base, tmp_path_factory.mktemp("run"))


# -- formatting and labels -------------------------------------------------------------------------


def test_trl_puts_loss_on_reasoning_answer_and_end_token_and_on_no_prompt_token(base, tmp_path):
    tokenizer = load_tokenizer(base)
    examples = examples_of([row(0), row(1, answer="short", finish_reason="length")], tokenizer)
    trainer = LoraTrainer(RECIPE.resolve(gpu=False), base, tmp_path, tokenizer, examples)
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    for example, ids, labels in zip(
        examples, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True
    ):
        carried = [label for label in labels if label != -100]
        assert tokenizer.decode(carried) == example.completion, (
            "every token of the completion, and nothing else"
        )
        assert (ids[: example.tokens], labels[: example.tokens]) == (
            list(example.input_ids),
            example.labels,
        )
        assert set(labels[example.tokens :]) <= {-100}, "padding carries no loss"
    whole, cut = examples
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert whole.input_ids[-1] == end and whole.tokens > cut.tokens, "the other row was padded"
    assert end not in cut.input_ids[cut.prompt_tokens :], "its model wrote none"


@pytest.mark.slow
def test_answers_that_were_cut_off_and_a_tokenizer_that_writes_a_first_token_are_trained_on(
    base, tmp_path
):
    """TRL would append the end token to the first, and the second's first token to all."""
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    tokenizer = load_tokenizer(folder)
    first = "<|endoftext|>"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.convert_tokens_to_ids(first))]
    )
    tokenizer.chat_template = first + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder)("a")["input_ids"][0] == tokenizer.convert_tokens_to_ids(first)
    rows = [row(index, finish_reason="length") for index in range(2)]
    (example, _) = examples_of(rows, load_tokenizer(folder))
    assert tokenizer.decode(example.input_ids[:2]).startswith(first)
    assert list(example.input_ids).count(tokenizer.convert_tokens_to_ids(first)) == 1
    recipe = RECIPE.model_copy(update={"num_epochs": 1})
    assert train(rows, recipe, folder, tmp_path / "run").steps == 1


def test_a_completion_whose_start_would_merge_into_the_prompt_is_tokenised_by_itself(base):
    tokenizer = load_tokenizer(base)
    newlines = "{{- '<|im_start|>assistant\\n<think>\\n' -}}"
    assert newlines in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(newlines, "{{- 'answer\\n' -}}")
    (example,) = examples_of([row(0)], tokenizer)
    prompt = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
    assert list(example.input_ids[: example.prompt_tokens]) == prompt
    assert tokenizer.decode(example.input_ids) == example.prompt + example.completion


def test_rows_that_cannot_be_trained_on_are_listed_with_their_reason(base):
    tokenizer = load_tokenizer(base)
    bad = [
        row(1, reasoning=REASONING * 50),
        row(2, reasoning="  \n"),
        row(3, answer=""),
        row(4, reasoning="so </think> no"),
        row(5, answer="done<|im_end|>\n<|im_start|>user\nmore"),
    ]
    examples = examples_of([row(0), *bad], tokenizer)
    kept, dropped = select_examples(examples, tokenizer, 1000)
    assert [example.candidate_id for example in kept] == ["c0"]
    assert {(item.candidate_id, item.reason) for item in dropped} == {
        ("c1", "overlong"),
        ("c2", "empty_reasoning"),
        ("c3", "empty_answer"),
        ("c4", "control_token"),
        ("c5", "control_token"),
    }
    longest = examples[1].tokens
    assert dropped[0].tokens == longest > 1000
    with pytest.raises(UsageError, match=f"no row is left.*raise max_length to {longest}"):
        select_examples(examples[1:], tokenizer, 1000)
    assert len(select_examples(examples[:2], tokenizer, longest)[0]) == 2, (
        "max_length itself is not too long"
    )


# -- training --------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_the_saved_adapter_changes_the_output(trained, base):
    assert trained.steps == len(trained.history) == 9
    assert trained.rows == 6
    assert trained.dropped == ()
    assert trained.loss_last < trained.loss_first
    assert [entry["step"] for entry in trained.history] == list(range(1, 10))
    assert trained.history[-1]["epoch"] == 3
    assert max(entry["learning_rate"] for entry in trained.history) == pytest.approx(
        RECIPE.learning_rate, rel=0.05
    )
    assert adapter_changes_output(base, trained.adapter_dir, "Write a kernel") > 1e-3
    config = json.loads((trained.adapter_dir / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (32, 32, 0.05)
    assert set(config["target_modules"]) == set(PROJECTIONS)
    modules = check_adapter(trained.adapter_dir).modules
    assert modules == 2 * 7, "seven projections in each of two layers"


def test_tokens_are_those_of_all_epochs(trained, base, rows):
    examples = examples_of(rows, load_tokenizer(base))
    assert trained.tokens == 3 * sum(example.tokens for example in examples)


def test_the_first_and_last_epoch_are_averaged_whole(trained):
    losses = [entry["loss"] for entry in trained.history]
    assert trained.loss_first == pytest.approx(sum(losses[:3]) / 3)
    assert trained.loss_last == pytest.approx(sum(losses[6:]) / 3)


def test_an_interrupted_run_continues_after_its_last_epoch_and_ends_with_the_same_adapter(
    trained, base, rows, tmp_path, capfd
):
    def stop_in_the_second_epoch(entry):
        if entry["step"] == 5:
            raise ConnectionError("power cut")

    with pytest.raises(EvalError, match="ConnectionError: power cut.*resume from"):
        train(rows, RECIPE, base, tmp_path, stop_in_the_second_epoch)
    assert not (tmp_path / "adapter").exists()
    # what a process killed while it writes a checkpoint leaves: newer than the complete one,
    # without the marker
    (tmp_path / "checkpoints" / "checkpoint-6").mkdir()
    (tmp_path / "checkpoints" / "checkpoint-6" / "adapter_model.safetensors").write_bytes(b"half")

    seen = []
    resumed = train(rows, RECIPE, base, tmp_path, lambda entry: seen.append(entry["step"]))
    assert seen == list(range(4, 10)), "the first epoch (steps 1 to 3) is not repeated"
    assert (resumed.resumed_from_step, resumed.tokens) == (3, trained.tokens)
    assert resumed.history == trained.history
    assert adapter_bytes(resumed) == adapter_bytes(trained)

    seen.clear()
    again = train(rows, RECIPE, base, tmp_path, lambda entry: seen.append(entry["step"]))
    assert not seen and (again.resumed_from_step, again.steps) == (9, 9)
    assert again.tokens == trained.tokens and adapter_bytes(again) == adapter_bytes(trained)
    assert capfd.readouterr().out == "", "stdout belongs to the caller"


def test_a_real_failure_of_the_cpu_allocator_is_recognised():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_a_missing_base_model_is_a_usage_error(rows, tmp_path):
    with pytest.raises(UsageError, match="cannot load"):
        train(rows, RECIPE, tmp_path / "nowhere", tmp_path / "run")


@pytest.fixture(scope="module")
def ray_here():
    import ray

    ray.init("local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_a_ray_task_trains_the_same_adapter_and_logs_while_it_does(
    ray_here, trained, base, rows, tmp_path
):
    seen = []
    result = train_on_ray(
        rows,
        RECIPE,
        base,
        tmp_path,
        lambda entry: seen.append((entry["step"], (tmp_path / "adapter").exists())),
    )
    assert [step for step, _ in seen] == list(range(1, 10))
    assert not seen[0][1], "the first log came while training was going on"
    assert result.tokens == trained.tokens
    assert result.loss_last == pytest.approx(trained.loss_last, rel=1e-3)
    with pytest.raises(UsageError, match="no row is left"):
        train_on_ray([row(0, answer="")], RECIPE, base, tmp_path / "none")
