"""torch.compile as a second baseline: what stays as it was without it, and the statistics of three
sides on samplers whose truth is known. What needs a compiler is in test_compiled_baseline.py."""

import pytest
from pydantic import ValidationError

from kernels_eval.__main__ import render
from kernels_eval.config import BuildConfig, EvalConfig, LimitsConfig, TimingConfig
from kernels_eval.errors import UsageError
from kernels_eval.judge.timing import CompiledSampler, measure
from kernels_eval.records import CompiledBaseline, Language, Status, Timing, Verdict, stable_hash
from kernels_eval.settings import load_protocol
from tests.support.scripted_time import busy, scripted_time

__all__ = ["scripted_time"]
CONFIG = TimingConfig(
    max_s=5.0,
    min_pairs=40,
    min_side_s=0.0,
    interval_width=0.5,
    bootstrap=400,
    sample_us=200,
    process_spread=0.0,
)
FACTS = {"mode": "default", "graphs": 1, "compile_s": 12.5}
BOTH = {"baselines": ("eager", "compile")}


class Scripted:
    """Reports about `call_ns` a call, never twice the same in a row, and writes down its turns."""

    def __init__(self, name, call_ns, turns):
        self.name, self.call_ns, self.turns, self.asked = name, call_ns, turns, 0

    def __call__(self, calls):
        self.asked += 1
        self.turns.append(self.name)
        return busy(self.call_ns * calls * (1 + 0.01 * ((self.asked * 7) % 5 - 2) / 2))


def measured(eager_ns, candidate_ns, compiled_ns):
    turns = []
    third = (
        None if compiled_ns is None else CompiledSampler(Scripted("c", compiled_ns, turns), FACTS)
    )
    timing = measure(
        Scripted("a", eager_ns, turns),
        Scripted("b", candidate_ns, turns),
        CONFIG,
        compiled=third,
        bound=lambda *_: (1.0, 1.0),
    )
    return timing, "".join(turns)


def test_three_sides_take_turns_in_an_order_that_reads_the_same_backwards():
    timing, turns = measured(500_000, 250_000, 400_000)
    window = turns[-6 * (timing.pairs // 2) :]
    assert window == "acbbca" * (timing.pairs // 2), (
        "each side is sampled as often as the others, at the same time on average"
    )


def test_the_speedup_against_each_baseline_has_its_own_interval():
    timing, _ = measured(500_000, 250_000, 400_000)
    assert timing.speedup == pytest.approx(2.0, rel=0.02)
    compiled = timing.compiled
    assert compiled is not None and (
        compiled.mode,
        compiled.graphs,
        compiled.compile_s,
        compiled.unavailable_reason,
    ) == ("default", 1, 12.5, "")
    assert compiled.reference_ms == pytest.approx(
        0.4, rel=0.02
    ) and compiled.speedup == pytest.approx(1.6, rel=0.02)
    assert compiled.speedup_lower <= 1.6 * 1.01 and compiled.speedup_upper >= 1.6 * 0.99
    assert timing.speedup_lower > compiled.speedup_upper, "eager and compiled are told apart"


def test_a_third_side_leaves_the_numbers_of_the_other_two_alone():
    alone, turns = measured(500_000, 250_000, None)
    assert "abbaabba" in turns and alone.compiled is None
    beside, _ = measured(500_000, 250_000, 400_000)
    assert beside.speedup == pytest.approx(alone.speedup, rel=0.01)


def test_the_fastest_side_decides_how_many_calls_a_sample_holds():
    timing, _ = measured(500_000, 250_000, 10_000)
    assert timing.calls_per_sample >= CONFIG.sample_us * 1e3 / 10_000


def test_a_third_side_whose_time_is_not_known_yet_keeps_the_measurement_going():
    config = CONFIG.model_copy(update={"interval_width": 0.02, "max_s": 2.0})
    spread = iter(range(10**9))
    third = CompiledSampler(lambda calls: busy(4e5 * calls * (1 + (next(spread) % 7))), FACTS)
    steady = {"bound": lambda *_: (1.0, 1.0), "compiled": third}
    timing = measure(
        lambda calls: busy(5e5 * calls), lambda calls: busy(2.5e5 * calls), config, **steady
    )
    assert timing.pairs > 4 * config.min_pairs


def test_the_default_is_eager_alone_and_hashes_as_it_did():
    """Fingerprints, verdict keys and manifests depend on these hashes: a new option must not change
    them where it is left alone."""
    assert EvalConfig().timing.baselines == ("eager",) and not EvalConfig().timing.compiles
    assert stable_hash(EvalConfig().model_dump(mode="json")) == "d0c0cdb0923b0a5b58578d72dad973da"
    quick = EvalConfig(
        build=BuildConfig(capture_timeout_s=10),
        timing=TimingConfig(max_s=0.6, min_pairs=6, min_side_s=0.02),
        limits=LimitsConfig(run_s=5, load_s=20),
    )
    assert stable_hash(quick.model_dump(mode="json")) == "4ce2a17df85997e7706457d852570b4e"
    assert (
        not {"baselines", "compile_mode", "compile_s"} & EvalConfig().model_dump()["timing"].keys()
    )
    assert EvalConfig.model_validate_json(EvalConfig().model_dump_json()) == EvalConfig()


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


def test_a_timing_without_it_is_written_as_it_always_was():
    timing, _ = measured(500_000, 250_000, None)
    names = "reference_ms candidate_ms speedup speedup_lower speedup_upper pairs calls_per_sample"
    names += " clock_bound_ms drift throttled"
    assert set(timing.model_dump()) == set(names.split())
    assert Timing.model_validate(timing.model_dump()) == timing
    with_it, _ = measured(500_000, 250_000, 400_000)
    assert Timing.model_validate_json(with_it.model_dump_json()) == with_it


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
    def shown(compiled):
        timing, _ = measured(500_000, 250_000, 400_000)
        facts = {
            "candidate_id": "c",
            "task_id": "t",
            "language": Language.CPP,
            "status": Status.CORRECT,
            "reason": "ok",
        }
        return render(Verdict(**facts, timing=timing.model_copy(update={"compiled": compiled})))

    there = measured(500_000, 250_000, 400_000)[0].compiled
    assert "against torch.compile (default): speedup 1.60" in shown(there)
    assert "no baseline, it does not compile" in shown(
        CompiledBaseline(mode="default", unavailable_reason="it does not compile")
    )
    assert "torch.compile" not in shown(None)


def test_a_protocol_for_the_command_line_takes_the_baselines():
    assert load_protocol(
        ["timing.baselines=[eager,compile]", "timing.compile_mode=max-autotune"]
    ).timing.compiles
    with pytest.raises(UsageError, match="baselines"):
        load_protocol(["timing.baselines=[compile]"])
