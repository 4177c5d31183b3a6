"""Reinforcement learns what is rewarded, drops what has no reward, and resumes."""

import math
import shutil
from concurrent.futures import CancelledError

import pytest

from kernels_eval.records import Verdict
from kernels_eval.rewards import Kevin
from tasks.sources.small_model import load_causal_model, load_tokenizer
from tasks.training.grpo import Answer, Asked, Environment, reinforce
from tasks.training.recipe import PROJECTIONS, ReinforceRecipe
from tests.support.training import tiny_model

PROMPTS = {"tasks/one": "Write the first kernel.", "tasks/two": "Write another kernel."}
RECIPE = ReinforceRecipe(
    reward=Kevin(),
    steps=5,
    tasks_per_step=2,
    samples_per_task=8,
    batch_size=16,
    learning_rate=2e-2,
    warmup_steps=0,
    max_grad_norm=1.0,
    beta=0.01,
    sampling={"temperature": 1.0, "max_tokens": 4},
    checkpoint_every_steps=3,
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


class World:
    """Answers of four tokens by the policy; the verdict of each says whether its first token is a
    wanted one. Notes how many verdicts were there before the last answer was written."""

    def __init__(self, *, apart=False, faults=frozenset()):
        self.faults, self.early, self.asked = faults, 0, list[list[Asked]]()
        self.environment = Environment(self.write, self.judge, apart)
        self.judged = 0

    def write(self, model, tokenizer, asked):
        import torch

        self.asked.append(list(asked))
        self.judged = 0
        for each in asked:
            generator = torch.Generator().manual_seed(each.seed)
            ids = torch.tensor([each.prompt])
            with torch.no_grad():
                for _ in range(4):
                    shares = model(input_ids=ids).logits[0, -1].softmax(-1)
                    token = torch.multinomial(shares, 1, generator=generator)
                    ids = torch.cat([ids, token[None]], dim=1)
            tokens = ids[0, len(each.prompt) :].tolist()
            self.early = max(self.early, self.judged)
            yield Answer(each, tokenizer.decode(tokens), tokens, reasoning_tokens=3)

    def judge(self, answers):
        for answer in answers:
            if answer is None:
                continue
            self.judged += 1
            if answer.asked.place not in self.faults:
                yield answer.asked.place, verdict(right=answer.tokens[0] % EVERY == 0)


def verdict(*, right):
    status = {"status": "correct", "reason": "ok"} if right else WRONG
    return Verdict(candidate_id="c", task_id="t", language="cpp", **status)


WRONG = {"status": "rejected", "reason": "no_custom_kernel"}


def trained(base, adapter, out, world, **changes):
    recipe = RECIPE.model_copy(update=changes)
    directory, log = reinforce(PROMPTS, recipe, base, adapter, out, world.environment)
    assert directory == out / "adapter" and (directory / "adapter_model.safetensors").is_file()
    assert not (directory / "ref").exists()
    assert [row["step"] for row in log] == list(range(1, recipe.steps + 1))
    return log


@pytest.mark.parametrize(
    "key, value",
    [
        *[(key, math.inf) for key in ("learning_rate", "beta", "max_grad_norm")],
        *[("temperature", value) for value in (0.0, math.inf, math.nan)],
        *[("seed", value) for value in (-1, 2**27)],  # torch's generators take 64 bits
        *[("samples_per_task", 1), ("batch_size", 3), ("steps", 0), ("steps", 1.5)],
        ("reward", {"name": "kevin", "correct": math.nan}),
    ],
)
def test_settings_that_cannot_be_learned_under_are_refused(key, value):
    given = {"sampling": {key: value}} if key == "temperature" else {key: value}
    with pytest.raises(ValueError, match=key):
        ReinforceRecipe.model_validate(given)


@pytest.mark.slow
def test_the_policy_learns_what_is_rewarded(base, adapter, tmp_path):
    world = World()
    log = trained(base, adapter, tmp_path, world)
    rates = [row["status/correct"] for row in log]
    assert sum(rates[:2]) < 1 < sum(rates[-2:]), rates
    for row in log:
        assert row["status/correct"] + row["status/rejected"] == pytest.approx(1)
        assert row["rejected/no_custom_kernel"] == row["status/rejected"]
        assert row["reward"] == pytest.approx(0.3 * row["status/correct"])
        assert row["reward"] == pytest.approx(row["reward/correct"] + row["reward/speedup"])
        assert row["kl"] >= 0 and row["reasoning_tokens"] == 3 and 0 <= row["idle_share"] <= 1
    assert world.early > 0, "verdicts are reached while other answers are being written"
    seeds = [each.seed for asked in world.asked for each in asked]
    assert len(set(seeds)) == len(seeds) == 5 * 16
    assert {each.task_id for each in world.asked[0]} == set(PROMPTS)


def test_a_fault_of_the_machine_is_no_reward_of_zero(base, adapter, tmp_path, caplog):
    world = World(apart=True, faults=frozenset(range(1, 16)))
    log = trained(base, adapter, tmp_path, world, steps=2, samples_per_task=8)
    assert all(row["without_reward"] == pytest.approx(15 / 16) for row in log)
    assert world.early == 0, "with `apart`, nothing is judged before all answers are written"
    assert not any(PROMPTS[name] in caplog.text for name in PROMPTS), "no prompt in the log"


def test_a_stopped_run_resumes_at_its_checkpoint_and_another_run_is_refused(
    base, adapter, tmp_path
):
    short = {"steps": 2, "checkpoint_every_steps": 1}

    class Stopped(World):
        def write(self, model, tokenizer, asked):
            if len(self.asked) == 1:
                raise KeyboardInterrupt
            return super().write(model, tokenizer, asked)

        def judge(self, answers):
            try:
                yield from super().judge(answers)
            except CancelledError:
                self.cancelled = True
                raise

    stopped = Stopped()
    with pytest.raises(KeyboardInterrupt):
        trained(base, adapter, tmp_path, stopped, **short)
    assert stopped.cancelled, "nobody waits for verdicts that are of no use"
    world = World()
    log = trained(base, adapter, tmp_path, world, **short)
    assert len(world.asked) == 1, "the second step; the first had been saved"
    assert all("reward" in row for row in log)
    shutil.rmtree(tmp_path / "adapter")
    with pytest.raises(Exception, match="is a checkpoint of another run: learning_rate"):
        trained(base, adapter, tmp_path, World(), **short, learning_rate=1e-3)


def test_a_step_whose_gradient_is_not_finite_changes_nothing(base, adapter, tmp_path, monkeypatch):
    import torch
    from safetensors.torch import load_file

    from tasks.training.grpo import RewardTrainer

    plain = RewardTrainer.compute_loss

    def poisoned(self, *given, **named):
        loss = plain(self, *given, **named)
        return loss * float("nan") if self.state.global_step == 1 else loss

    monkeypatch.setattr(RewardTrainer, "compute_loss", poisoned)
    log = trained(base, adapter, tmp_path, World(), steps=3)
    assert [row["skipped_updates"] for row in log] == [0, 1, 1]
    learned = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(bool(torch.isfinite(each).all()) for each in learned.values())
