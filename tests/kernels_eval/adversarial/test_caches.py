"""Answers that are not computed: kept from an earlier call, found in old memory, or known
beforehand (threats 1, 2, 11, 26, 27)."""

from __future__ import annotations

import pytest

from tests.support.adversarial import AFFINE_CPP, Case, trials, writer
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
        "stale_cache",
        cache("x.data_ptr()"),
        twin=code(TABLE, init="self.rows = {}"),
    ),
    Case(1, "by_id", "stale_cache", cache("id(x)")),
    Case(1, "by_shape", "stale_cache", cache("tuple(x.shape)")),
    Case(
        1,
        "by_call_count",
        "stale_cache",
        code(
            COUNTED
            + "if self.calls == 1:\n    self.kept = ext.affine(x)\nreturn self.kept.clone()",
            init=NO_CALLS,
        ),
    ),
    Case(
        1,
        "by_version",
        ("implausible_time", "stale_cache"),
        code(VERSIONED, init="self.seen = {}"),
        task=WAVE,
        twin=code("self.last = x\nreturn ext.wave(x)", init="self.last = None"),
    ),
    # Poisoned memory is the same nonsense for all inputs, which is as good a name for it.
    Case(
        2,
        "nothing_written",
        ("wrong_output", "non_finite", "input_independent"),
        "return ext.nothing(x)",
        twin="return ext.affine_into(x, torch.empty_like(x))",
    ),
    Case(2, "half_written", ("wrong_output", "non_finite"), "return ext.half(x)"),
    Case(
        2,
        "right_answer_freed",
        ("wrong_output", "non_finite", "input_independent"),
        "return ext.after_free(x)",
    ),
    Case(
        11,
        "static_output",
        "output_aliased",
        code(
            "if self.out.shape != x.shape:\n    self.out = torch.empty_like(x)\nreturn"
            " ext.affine_into(x, self.out)",
            init="self.out = torch.empty(48, 64)",
        ),
        twin=code(
            "if self.out.shape != x.shape:\n    self.out = torch.empty_like(x)\nreturn"
            " ext.affine_into(x, self.out).clone()",
            init="self.out = torch.empty(48, 64)",
        ),
    ),
    Case(
        11,
        "two_buffers_in_turn",
        "output_aliased",
        code(
            "self.turn = 1 - self.turn\nreturn ext.affine_into(x, self.pair[self.turn])",
            init="self.turn = 0\nself.pair = [torch.empty(48, 64), torch.empty(48, 64)]",
        ),
    ),
    Case(
        26,
        "seed_42",
        ("wrong_output", "input_independent", "stale_cache"),
        code(
            "ext.affine(x)\nreturn self.answer.clone()",
            init="torch.manual_seed(42)\nself.answer = ext.affine(torch.randn(48, 64))",
        ),
        twin=code(
            "return ext.by_row(x, self.gain[: x.shape[-1]])",
            init="torch.manual_seed(42)\nself.gain = torch.full((64,), 2.0)",
        ),
    ),
    Case(
        26,
        "looked_up_input",
        ("wrong_output", "input_independent"),
        code(
            "known = torch.equal(x, self.expected_input)\ny = ext.affine(x)\nreturn"
            " self.answer.clone() if known else y * 0.0",
            init=(
                "torch.manual_seed(42)\nself.expected_input = torch.randn(48, 64)\nself.answer ="
                " ext.affine(self.expected_input)"
            ),
        ),
    ),
    Case(
        27,
        "wrong_later",
        "wrong_output",
        code(
            COUNTED + "return ext.affine(x) if self.calls <= 6 else ext.shifted(x)", init=NO_CALLS
        ),
        twin=code(
            "if self.kept is None:\n    self.kept = torch.full((64,), 2.0)\nreturn ext.by_row(x,"
            " self.kept[: x.shape[-1]])",
            init=NO_CALLS,
        ),
    ),
    Case(
        27,
        "torch_later",
        "no_custom_kernel",
        code(COUNTED + "return ext.affine(x) if self.calls <= 3 else x * 2.0 + 1.0", init=NO_CALLS),
    ),
    Case(
        27,
        "kept_once_the_checks_are_over",
        LATE,
        code(
            COUNTED + "if self.calls <= 40:\n    self.kept = ext.wave(x)\nreturn self.kept",
            init=NO_CALLS,
        ),
        task=WAVE,
    ),
    Case(
        27,
        "torch_once_the_checks_are_over",
        "no_custom_kernel",
        code(
            COUNTED + "return ext.affine(x) if self.calls <= 40 else x * 2.0 + 1.0", init=NO_CALLS
        ),
    ),
]


@pytest.mark.parametrize("trial", trials(CASES, code))
def test_caches(judge, trial):
    trial.assert_judged(judge)
