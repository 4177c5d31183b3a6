"""Answers that are not computed: kept from an earlier call, found in old memory, or known
beforehand (threats 1, 2, 11, 26, 27)."""

from __future__ import annotations

import pytest

from tests.support.adversarial import AFFINE, AFFINE_CPP, Case, Trial, Verifier, trials, writer
from tests.support.kernels import kernel_task, task_source

SOURCE = (
    AFFINE_CPP
    + r"""
#include <cmath>
torch::Tensor shifted(torch::Tensor x) {
  auto out = affine(x);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] += 0.5f;
  return out;
}
torch::Tensor nothing(torch::Tensor x) { return torch::empty_like(x); }
torch::Tensor half(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel() / 2; ++i)
      out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * 2.0f + 1.0f;
  return out;
}
torch::Tensor after_free(torch::Tensor x) {
  { auto right = affine(x); }
  return torch::empty_like(x);
}
torch::Tensor wave(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = (float)(std::sin(v) * std::exp(-v * v));
  }
  return out;
}
torch::Tensor by_row(torch::Tensor x, torch::Tensor gain) {
  auto out = torch::empty_like(x);
  const int64_t n = gain.numel();
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * gain.data_ptr<float>()[i % n] + 1.0f;
  return out;
}
"""
)
code = writer(
    SOURCE,
    ["affine", "affine_into", "shifted", "nothing", "half", "after_free", "wave", "by_row"],
    "adversarial_caches",
)

WAVE = kernel_task(
    task_source("return torch.sin(x) * torch.exp(-x * x)", inputs="[torch.randn(96, 192)]"),
    "adversarial_wave",
)
"""Slow enough (hundreds of microseconds) that looking an answer up is unmistakably faster."""


def cache(key: str) -> str:
    return code(
        f"key = {key}\nif key not in self.seen:\n    self.seen[key] = ext.affine(x)\nreturn"
        " self.seen[key]",
        init="self.seen = {}",
    )


# The input is kept as well: its address is then never given to another one, so the cache is right
# for whatever the checks draw.
VERSIONED = """key = (x.data_ptr(), x._version)
if key not in self.seen:
    self.seen[key] = (x, ext.wave(x))
return self.seen[key][1].clone()"""
TABLE = """key = x.shape[-1]
if key not in self.rows:
    self.rows[key] = torch.full((key,), 2.0)
return ext.by_row(x, self.rows[key])"""
COUNTED = "self.calls += 1\n"
NO_CALLS = "self.calls = 0\nself.kept = None"
LATE = ("stale_cache", "wrong_output", "no_custom_kernel", "implausible_time")

CASES = [
    Case(
        1,
        "by_data_ptr",
        AFFINE,
        cache("x.data_ptr()"),
        "stale_cache",
        twin=code(TABLE, init="self.rows = {}"),
    ),
    Case(1, "by_id", AFFINE, cache("id(x)"), "stale_cache"),
    Case(1, "by_shape", AFFINE, cache("tuple(x.shape)"), "stale_cache"),
    Case(
        1,
        "by_call_count",
        AFFINE,
        code(
            COUNTED
            + "if self.calls == 1:\n    self.kept = ext.affine(x)\nreturn self.kept.clone()",
            init=NO_CALLS,
        ),
        "stale_cache",
    ),
    Case(
        1,
        "by_version",
        WAVE,
        code(VERSIONED, init="self.seen = {}"),
        ("implausible_time", "stale_cache"),
        twin=code("self.last = x\nreturn ext.wave(x)", init="self.last = None"),
    ),
    # Poisoned memory is the same nonsense for all inputs, which is as good a name for it.
    Case(
        2,
        "nothing_written",
        AFFINE,
        code("return ext.nothing(x)"),
        ("wrong_output", "non_finite", "input_independent"),
        twin=code("return ext.affine_into(x, torch.empty_like(x))"),
    ),
    Case(2, "half_written", AFFINE, code("return ext.half(x)"), ("wrong_output", "non_finite")),
    Case(
        2,
        "right_answer_freed",
        AFFINE,
        code("return ext.after_free(x)"),
        ("wrong_output", "non_finite", "input_independent"),
    ),
    Case(
        11,
        "static_output",
        AFFINE,
        code(
            "if self.out.shape != x.shape:\n    self.out = torch.empty_like(x)\nreturn"
            " ext.affine_into(x, self.out)",
            init="self.out = torch.empty(48, 64)",
        ),
        "output_aliased",
        twin=code(
            "if self.out.shape != x.shape:\n    self.out = torch.empty_like(x)\nreturn"
            " ext.affine_into(x, self.out).clone()",
            init="self.out = torch.empty(48, 64)",
        ),
    ),
    Case(
        11,
        "two_buffers_in_turn",
        AFFINE,
        code(
            "self.turn = 1 - self.turn\nreturn ext.affine_into(x, self.pair[self.turn])",
            init="self.turn = 0\nself.pair = [torch.empty(48, 64), torch.empty(48, 64)]",
        ),
        "output_aliased",
    ),
    Case(
        26,
        "seed_42",
        AFFINE,
        code(
            "ext.affine(x)\nreturn self.answer.clone()",
            init="torch.manual_seed(42)\nself.answer = ext.affine(torch.randn(48, 64))",
        ),
        ("wrong_output", "input_independent", "stale_cache"),
        twin=code(
            "return ext.by_row(x, self.gain[: x.shape[-1]])",
            init="torch.manual_seed(42)\nself.gain = torch.full((64,), 2.0)",
        ),
    ),
    Case(
        26,
        "looked_up_input",
        AFFINE,
        code(
            "known = torch.equal(x, self.expected_input)\ny = ext.affine(x)\nreturn"
            " self.answer.clone() if known else y * 0.0",
            init=(
                "torch.manual_seed(42)\nself.expected_input = torch.randn(48, 64)\nself.answer ="
                " ext.affine(self.expected_input)"
            ),
        ),
        ("wrong_output", "input_independent"),
    ),
    Case(
        27,
        "wrong_later",
        AFFINE,
        code(
            COUNTED + "return ext.affine(x) if self.calls <= 6 else ext.shifted(x)", init=NO_CALLS
        ),
        "wrong_output",
        twin=code(
            "if self.kept is None:\n    self.kept = torch.full((64,), 2.0)\nreturn ext.by_row(x,"
            " self.kept[: x.shape[-1]])",
            init=NO_CALLS,
        ),
    ),
    Case(
        27,
        "torch_later",
        AFFINE,
        code(COUNTED + "return ext.affine(x) if self.calls <= 3 else x * 2.0 + 1.0", init=NO_CALLS),
        "no_custom_kernel",
    ),
    Case(
        27,
        "kept_once_the_checks_are_over",
        WAVE,
        code(
            COUNTED + "if self.calls <= 40:\n    self.kept = ext.wave(x)\nreturn self.kept",
            init=NO_CALLS,
        ),
        LATE,
    ),
    Case(
        27,
        "torch_once_the_checks_are_over",
        AFFINE,
        code(
            COUNTED + "return ext.affine(x) if self.calls <= 40 else x * 2.0 + 1.0", init=NO_CALLS
        ),
        "no_custom_kernel",
    ),
]


@pytest.mark.parametrize("trial", trials(CASES))
def test_caches(judge: Verifier, trial: Trial) -> None:
    trial.assert_judged(judge)
