"""Reinforcement learns what is rewarded, drops what has no reward, and resumes."""

import math

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.records import Verdict
from tasks.models import chat_text, load_causal_model, load_tokenizer
from tasks.store import SnapshotRef
from tasks.synthesis.refine import told_in_place
from tasks.training import grpo
from tasks.training.grpo import Judged, grpo_config, reinforce
from tasks.training.recipe import PROJECTIONS, ReinforceRecipe
from tasks.training.reinforce import planned
from tests.support.training import tiny_model

PROMPTS = {"tasks/one": "Write the first kernel.", "tasks/two": "Write another kernel."}
RECIPE = ReinforceRecipe(
    reward="kevin",
    steps=5,
    tasks_per_step=2,
    samples_per_task=8,
    batch_size=16,
    learning_rate=2e-2,
    beta=0.01,
    max_tokens=4,
)
EVERY = 4
"""Token ids that this divides are what the rewards of these tests ask for."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model whose logits differ, so that an adapter can move them."""
    import torch

    plain = tiny_model(tmp_path_factory.mktemp("models") / "plain")
    directory = plain.with_name("small")
    model = load_causal_model(plain, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    model.save_pretrained(directory)
    load_tokenizer(plain).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    directory = tmp_path_factory.mktemp("trained") / "adapter"
    get_peft_model(load_causal_model(base, dtype=torch.float32), lora).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """At the whole learning rate from the first step."""
    monkeypatch.setattr(grpo, "WARMUP_STEPS", 0)
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 1.0)


class World:
    """The verdict of an answer says whether its first token is a wanted one; the answers at the
    places of `faults` get none."""

    def __init__(self, base, faults=frozenset()):
        self.tokenizer, self.faults = load_tokenizer(base), faults
        self.asked = []

    def judge(self, task_ids, answers):
        self.asked.append((list(task_ids), list(answers)))
        return [
            Judged(known, "a thought", told_in_place(known))
            for place, answer in enumerate(answers)
            for known in [None if place in self.faults else verdict(self.right(answer))]
        ]

    def right(self, answer):
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return bool(ids) and ids[0] % EVERY == 0


def verdict(right):
    status = {"status": "correct", "reason": "ok"} if right else WRONG
    return Verdict(candidate_id="c", task_id="t", language="cpp", **status)


WRONG = {"status": "rejected", "reason": "no_custom_kernel"}


def trained(base, adapter, out, world, **changes):
    recipe = RECIPE.model_copy(update=changes)
    directory, log = reinforce(PROMPTS, recipe, base, adapter, out, world.judge)
    assert directory == out / "adapter" and (directory / "adapter_model.safetensors").is_file()
    assert not (directory / "ref").exists()
    assert [row["step"] for row in log] == list(range(1, recipe.steps + 1))
    return log


@pytest.mark.parametrize(
    "key, value",
    [
        *[(key, math.inf) for key in ("learning_rate", "beta")],
        *[("temperature", value) for value in (0.0, math.inf, math.nan)],
        *[("seed", value) for value in (-1, 2**27)],
        *[
            ("samples_per_task", 1),
            ("batch_size", 3),
            ("steps", 0),
            ("steps", 1.5),
            ("vllm", "server"),
        ],
        ("reward", "kevn"),
    ],
)
def test_settings_that_cannot_be_learned_under_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        ReinforceRecipe.model_validate({key: value})


def test_fewer_tasks_than_a_step_takes_are_refused_before_any_worker():
    with pytest.raises(UsageError, match=r"of 1 task, and a step takes 2 \(--set .*per_step=1"):
        planned(SnapshotRef(root="r", stage="training", fingerprint="f"), RECIPE, {"one": "Write."})


@pytest.mark.parametrize("vllm, mode", [("colocate", "colocate"), ("http://gpu7:8000", "server")])
def test_vllm_writes_the_answers_under_trls_own_correction(tmp_path, monkeypatch, vllm, mode):
    recipe = RECIPE.model_copy(update={"vllm": vllm})
    with pytest.raises(UsageError, match=f"reinforcement.vllm is {vllm} and vLLM is not installed"):
        grpo_config(recipe, tmp_path, gpu=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    args = grpo_config(recipe, tmp_path, gpu=False)
    assert (args.use_vllm, args.vllm_mode) == (True, mode)
    assert args.vllm_server_base_url == (vllm if mode == "server" else None)
    assert args.vllm_importance_sampling_correction
    assert not grpo_config(RECIPE, tmp_path, gpu=False).use_vllm


@pytest.mark.slow
def test_the_policy_learns_what_is_rewarded(base, adapter, tmp_path):
    world = World(base)
    log = trained(base, adapter, tmp_path, world)
    rates = [row["status/correct"] for row in log]
    assert sum(rates[:2]) < 1 < sum(rates[-2:]), rates
    for row in log:
        assert row["status/correct"] + row["status/rejected"] == pytest.approx(1)
        assert row["rejected/no_custom_kernel"] == row["status/rejected"]
        assert row["reward"] == pytest.approx(0.3 * row["status/correct"])
        assert row["reward"] == pytest.approx(row["reward/correct"] + row["reward/speedup"])
        assert row["kl"] >= 0 and row["reasoning_tokens"] > 0 and row["judged_s"] >= 0
    for task_ids, answers in world.asked:
        assert len(answers) == 16 and set(task_ids) == set(PROMPTS)


def test_a_fault_of_the_machine_is_no_reward_of_zero(base, adapter, tmp_path, caplog):
    world = World(base, faults=frozenset(range(1, 16)))
    log = trained(base, adapter, tmp_path, world, steps=2)
    assert all(row["without_reward"] == pytest.approx(15 / 16) for row in log)
    assert not any(PROMPTS[name] in caplog.text for name in PROMPTS), "no prompt in the log"


@pytest.mark.slow
def test_a_stopped_run_resumes_at_its_checkpoint(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "CHECKPOINT_STEPS", 1)

    class Stopped(World):
        def judge(self, task_ids, answers):
            if len(self.asked) == 1:
                raise KeyboardInterrupt
            return super().judge(task_ids, answers)

    with pytest.raises(KeyboardInterrupt):
        trained(base, adapter, tmp_path, Stopped(base), steps=2)
    world = World(base)
    log = trained(base, adapter, tmp_path, world, steps=2)
    assert len(world.asked) == 1, "the second step; the first had been saved"
    assert all("reward" in row for row in log)


@pytest.fixture(scope="module")
def brief(base, tmp_path_factory):
    """The model of `base`, of which about half of the answers end at once."""
    import torch

    model, tokenizer = load_causal_model(base, dtype=torch.float32), load_tokenizer(base)
    ids = tokenizer(chat_text(tokenizer, PROMPTS["tasks/one"]), add_special_tokens=False)
    directory = tmp_path_factory.mktemp("models") / "brief"
    with torch.no_grad():
        seen = model(torch.tensor([ids["input_ids"]]), output_hidden_states=True)
        last = seen.hidden_states[-1][0, -1]
        total = seen.logits[0, -1].logsumexp(0)
        model.get_output_embeddings().weight[tokenizer.eos_token_id] = last * total / last.dot(last)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_a_failed_answer_is_told_its_verdict_and_answers_once_more(
    brief, adapter, tmp_path, monkeypatch
):
    from trl import GRPOTrainer

    seen = []
    plain = GRPOTrainer._generate

    def watched(self, prompts):
        made = plain(self, prompts)
        seen.append(made)
        return made

    monkeypatch.setattr(GRPOTrainer, "_generate", watched)
    world = World(brief)
    log = trained(brief, adapter, tmp_path, world, turns=2, steps=1)
    (_, first), (_, second) = world.asked
    assert 0 < len(second) < len(first) == 16
    (prompts, completions, masks, *_) = seen[0]
    told = [place for place, mask in enumerate(masks) if 0 in mask]
    assert len(told) == len(second)
    assert log[0]["followed_up"] == pytest.approx(len(second) / len(first))
    eos = world.tokenizer.eos_token_id
    for ids, mask in zip(completions, masks, strict=True):
        assert len(ids) == len(mask)
        reply = [token for token, learned in zip(ids, mask, strict=True) if not learned]
        if not reply:
            continue
        start = mask.index(0)
        assert ids[start - 1] == eos, "only finished answers are followed up"
        text = world.tokenizer.decode(reply)
        assert "It breaks this rule" in text and "Write the module again" in text
        whole = world.tokenizer.decode(ids[start - 1 : start + len(reply)])
        assert whole.endswith(chat_text(world.tokenizer, "x").rpartition("x")[2])
    last = dict(enumerate(first)) | dict(zip(told, second, strict=True))
    assert log[0]["status/correct"] == pytest.approx(sum(map(world.right, last.values())) / 16)


@pytest.mark.slow
def test_a_step_whose_gradient_is_not_finite_changes_nothing(base, adapter, tmp_path, monkeypatch):
    import torch
    from safetensors.torch import load_file
    from trl import GRPOTrainer

    plain = GRPOTrainer.compute_loss

    def poisoned(self, *given, **named):
        loss = plain(self, *given, **named)
        return loss * float("nan") if self.state.global_step == 1 else loss

    monkeypatch.setattr(GRPOTrainer, "compute_loss", poisoned)
    log = trained(base, adapter, tmp_path, World(base), steps=3)
    assert [row["skipped_updates"] for row in log] == [0, 1, 1]
    learned = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(bool(torch.isfinite(each).all()) for each in learned.values())


def test_a_prompt_that_fills_the_window_is_refused_before_training(base, adapter, tmp_path):
    long = {"tasks/one": "word " * 40_000}
    with pytest.raises(UsageError, match="fills the base model's window"):
        reinforce(long, RECIPE, base, adapter, tmp_path, World(base).judge)
