"""torch.compile as a second baseline: what stays as it was without it, and the statistics of the
ratio of two speedups. What needs a compiler is in test_compiled_baseline.py."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from flows.cli.verdict import render
from kernels_eval.config import EvalConfig, TimingConfig
from kernels_eval.errors import UsageError
from kernels_eval.judge.compiled_baseline import CompiledReference
from kernels_eval.judge.timing import measure, ratio_of_speedups
from kernels_eval.records import CompiledBaseline, Language, Status, Verdict, stable_hash
from kernels_eval.settings import load_protocol
from tests.support.scripted_time import busy, scripted_time

__all__ = ["scripted_time"]
CONFIG = TimingConfig(
    max_s=5.0,
    min_pairs=40,
    min_side_s=0.0,
    interval_width=0.5,
    sample_us=200,
)
BOTH = {"baselines": ("eager", "compile")}


class Scripted:
    """Reports about `call_ns` a call, never twice the same in a row, and writes down its turns."""

    def __init__(self, name, call_ns, turns):
        self.name, self.call_ns, self.turns, self.asked = name, call_ns, turns, 0

    def __call__(self, calls):
        self.asked += 1
        self.turns.append(self.name)
        return busy(self.call_ns * calls * (1 + 0.01 * ((self.asked * 7) % 5 - 2) / 2))


def measured(reference_ns, candidate_ns):
    turns = []
    timing = measure(
        Scripted("a", reference_ns, turns),
        Scripted("b", candidate_ns, turns),
        CONFIG,
        bound=lambda *_: (1.0, 1.0),
    )
    return timing, "".join(turns)


def against(timing, compiled_ns=400_000, *, reason=""):
    """The record of a candidate against a compiled reference of so many nanoseconds a call."""
    config = EvalConfig(timing=TimingConfig.model_validate(BOTH))
    reference = CompiledReference(SimpleNamespace(config=config))
    reference.unavailable_reason, reference.graphs = reason, 1
    reference.timing = None if reason else measured(500_000, compiled_ns)[0]
    return reference.against(timing)


def test_both_sides_are_sampled_in_an_order_that_reads_the_same_backwards():
    timing, turns = measured(500_000, 250_000)
    assert turns.endswith("abba" * (timing.pairs // 2)) and timing.compiled is None


def test_the_speedup_against_each_baseline_has_its_own_interval():
    timing, _ = measured(500_000, 250_000)
    assert timing.speedup == pytest.approx(2.0, rel=0.02)
    compiled = against(timing)
    assert (compiled.mode, compiled.graphs, compiled.unavailable_reason) == ("default", 1, "")
    assert compiled.reference_ms == pytest.approx(0.4, rel=0.02)
    assert compiled.speedup == pytest.approx(1.6, rel=0.02)
    assert compiled.speedup == pytest.approx(compiled.reference_ms / timing.candidate_ms)
    assert compiled.speedup_lower <= 1.6 * 1.01 and compiled.speedup_upper >= 1.6 * 0.99
    assert timing.speedup_lower > compiled.speedup_upper, "eager and compiled are told apart"


@pytest.mark.parametrize(
    "candidate, baseline, expected",
    [
        ((2.0, 1.0, 4.0), (1.0, 1.0, 1.0), (2.0, 1.0, 4.0)),
        ((2.0, 2.0, 2.0), (4.0, 2.0, 16.0), (0.5, 0.125, 1.0)),
        # 3 and 4 doublings below, 6 and 8 above
        ((1.0, 1 / 8, 64.0), (1.0, 1 / 256, 16.0), (1.0, 2.0**-5, 2.0**10)),
    ],
)
def test_arms_of_two_intervals_add_in_quadrature(candidate, baseline, expected):
    timing, _ = measured(500_000, 250_000)
    names = ("speedup", "speedup_lower", "speedup_upper")
    both = [
        timing.model_copy(update=dict(zip(names, numbers, strict=True)))
        for numbers in (candidate, baseline)
    ]
    assert ratio_of_speedups(*both) == pytest.approx(expected)


def test_a_second_baseline_is_part_of_the_key_with_all_that_bears_on_it():
    keys = {
        stable_hash(
            EvalConfig(timing=TimingConfig.model_validate(BOTH | more)).model_dump(mode="json")
        )
        for more in ({}, {"compile_mode": "max-autotune"}, {"compile_s": 60})
    }
    assert len(keys) == 3
    asked = EvalConfig(timing=TimingConfig.model_validate(BOTH))
    assert EvalConfig.model_validate_json(asked.model_dump_json()) == asked
    swapped = TimingConfig.model_validate({"baselines": ["compile", "eager", "compile"]})
    assert swapped.baselines == ("eager", "compile"), (
        "an order means nothing, so it makes no other key"
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"baselines": ()},
        {"baselines": ("compile",)},
        {"baselines": ("eager", "jit")},
        {"compile_mode": "fast"},
    ],
)
def test_baselines_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValidationError):
        TimingConfig.model_validate(bad)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"reference_ms": 1.0},
        {"unavailable_reason": "no", "reference_ms": 1.0},
        {"unavailable_reason": "no", "speedup": 2.0},
    ],
)
def test_a_baseline_has_all_of_its_numbers_or_a_reason(bad):
    with pytest.raises(ValidationError, match="either all of its numbers or a reason why"):
        CompiledBaseline.model_validate({"mode": "default", **bad})


def test_a_verdict_for_a_person_names_the_baseline():
    timing, _ = measured(500_000, 250_000)

    def shown(compiled):
        facts = {
            "candidate_id": "c",
            "task_id": "t",
            "language": Language.CPP,
            "status": Status.CORRECT,
            "reason": "ok",
        }
        return render(Verdict(**facts, timing=timing.model_copy(update={"compiled": compiled})))

    assert "against torch.compile (default): speedup 1.60" in shown(against(timing))
    lost = against(timing, reason="it does not compile")
    assert "no baseline, it does not compile" in shown(lost)
    assert "torch.compile" not in shown(None)


def test_a_protocol_for_the_command_line_takes_the_baselines():
    assert load_protocol(
        ["timing.baselines=[eager,compile]", "timing.compile_mode=max-autotune"]
    ).timing.compiles
    with pytest.raises(UsageError, match="baselines"):
        load_protocol(["timing.baselines=[compile]"])
