"""Records cannot be built in an illegal state, survive serialisation, and are identified by what
they hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kernels_eval.errors import DeviceError, UsageError
from kernels_eval.records import (
    STATUS_OF,
    Candidate,
    KernelTask,
    Language,
    SamplingParams,
    Status,
    Timing,
    Verdict,
    stable_hash,
)
from kernels_eval.records import candidate_id as identity

TIMING = Timing(
    reference_ms=2.0,
    candidate_ms=1.0,
    speedup=2.0,
    speedup_lower=1.9,
    speedup_upper=2.1,
    pairs=10,
    calls_per_sample=4,
    clock_bound_ms=0.9,
)
TASK = KernelTask(task_id="t/1", name="one", code="class Model: pass")


def verdict(status, reason, **fields):
    return Verdict(
        candidate_id="c",
        task_id="t/1",
        language=Language.CPP,
        status=status,
        reason=reason,
        **fields,
    )


@given(st.sampled_from(list(Status)), st.sampled_from(sorted(STATUS_OF)))
def test_a_reason_fits_its_own_status_only(status, reason):
    if STATUS_OF[reason] is status:
        assert verdict(status, reason).reason == reason
    else:
        with pytest.raises(ValidationError, match="does not belong"):
            verdict(status, reason)


@pytest.mark.parametrize("reason", sorted(set(STATUS_OF) - {"ok"}))
def test_only_a_correct_candidate_has_a_timing(reason):
    with pytest.raises(ValidationError, match="only a correct candidate"):
        verdict(STATUS_OF[reason], reason, timing=TIMING)
    assert verdict(STATUS_OF[reason], reason).speedup == 0.0


def test_the_two_tracks():
    torch_did_it = verdict(Status.REJECTED, "no_custom_kernel", outputs_match=True)
    assert torch_did_it.correct_any and not torch_did_it.correct_custom
    assert not verdict(Status.REJECTED, "no_custom_kernel", outputs_match=False).correct_any
    assert not verdict(Status.REJECTED, "stale_cache", outputs_match=True).correct_any
    assert verdict(Status.CORRECT, "ok").correct_custom


def candidate(**fields):
    return Candidate(
        candidate_id="c", task_id="t/1", language=Language.CPP, generator="g", **fields
    )


def test_a_candidate_has_code_or_a_reason_and_never_both():
    assert candidate(code="x = 1").parse_reason is None
    assert candidate(parse_reason="truncated").code is None
    with pytest.raises(ValidationError, match="either code or a parse_reason"):
        candidate()
    with pytest.raises(ValidationError, match="either code or a parse_reason"):
        candidate(code="x = 1", parse_reason="truncated")
    with pytest.raises(ValidationError, match="is not one of"):
        candidate(parse_reason="build_failed")


def test_identity_covers_everything_that_drew_the_response():
    params = SamplingParams()
    base = identity(TASK, "g", params, 0, "text")
    assert base == identity(TASK, "g", SamplingParams(), 0, "text")
    assert base == identity(TASK.model_copy(update={"name": "renamed"}), "g", params, 0, "text")
    others = [
        identity(TASK.model_copy(update={"code": "class Model: ..."}), "g", params, 0, "text"),
        identity(TASK, "h", params, 0, "text"),
        identity(TASK, "g", SamplingParams(temperature=0.5), 0, "text"),
        identity(TASK, "g", params, 1, "text"),
        identity(TASK, "g", params, 0, "text "),
    ]
    assert len({base, *others}) == 6


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none(), max_size=6))
def test_a_hash_ignores_key_order_and_takes_any_text(values):
    assert stable_hash(values) == stable_hash(dict(reversed(list(values.items()))))
    assert len(stable_hash(values)) == 32


def test_a_hash_takes_half_a_character():
    """Responses may hold lone surrogates."""
    assert stable_hash("\ud800") != stable_hash("\ud801")


@pytest.mark.parametrize(
    "error", [UsageError("cannot read x", "give a path"), DeviceError("no GPU", "use cpp")]
)
def test_an_error_keeps_its_hint_across_processes(error):
    import pickle

    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and copy.hint == error.hint and str(copy) == str(error)
    assert error.hint in str(error)
