"""The form of the adversarial corpus: one case is a cheat, the reasons it may end with, and a
near-twin that is honest.

Guarantees: every case is judged on status and reason; a twin is always judged as `correct`. The
numbers of threats are those of the list in docs/explanation/verification.md, 1 to 40.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import pytest

from kernels_eval.records import STATUS_OF, KernelTask, Language, Verdict
from tests.support.kernels import Verifier, kernel_task, load_inline, module, task_source

Check = Callable[[Verdict], None]


@dataclass(frozen=True)
class Case:
    """A cheat and its twin. `expect` lists every reason that the cheat may end with; one is
    preferred, more only where chance decides.

    `twin` is None where an earlier case of the same threat has it. `twin_task` is the cheat's own
    unless given.
    """

    threat: int
    name: str
    expect: str | tuple[str, ...]
    code: str
    """A candidate's source, or the body of its `forward` alone."""
    task: KernelTask = field(default_factory=lambda: AFFINE)
    twin: str | None = None
    twin_task: KernelTask | None = None
    check: Check | None = None
    twin_check: Check | None = None
    language: Language = Language.CPP
    deadline_s: float | None = None
    """Of the test of the cheat: for attacks whose failure is that the verifier never comes to an
    end."""

    @property
    def needs_gpu(self) -> bool:
        return self.language.needs_gpu


@dataclass(frozen=True)
class Trial:
    """One candidate to judge: a case's cheat or its twin."""

    task: KernelTask
    code: str
    expect: tuple[str, ...]
    check: Check | None
    language: Language

    def assert_judged(self, verify: Verifier) -> None:
        verdict = verify(self.task, self.code, language=self.language)
        seen = f"{verdict.status.value}/{verdict.reason}: {verdict.detail}\n{verdict.log_tail}"
        assert verdict.reason in self.expect, f"expected {' or '.join(self.expect)}, saw {seen}"
        assert verdict.status is STATUS_OF[verdict.reason]
        assert (verdict.timing is not None) == (verdict.reason == "ok")
        if self.check:
            self.check(verdict)


def trials(cases: Iterable[Case], write: Callable[[str], str]) -> list[object]:
    """Pytest parameters with ids such as `t07-fallback-cheat`. Cases of one task follow each other:
    its reference is loaded once. `write` makes a candidate of the body of a `forward`."""
    cases = list(cases)

    def whole(code: str) -> str:
        return code if "class ModelNew" in code else write(code)

    order = list(dict.fromkeys(case.task.task_id for case in cases))
    found = []
    for case in sorted(cases, key=lambda case: order.index(case.task.task_id)):
        expect = (case.expect,) if isinstance(case.expect, str) else case.expect
        name = f"t{case.threat:02d}-{case.name}"
        cheat = Trial(case.task, whole(case.code), expect, case.check, case.language)
        marks = [pytest.mark.timeout(case.deadline_s)] if case.deadline_s else []
        found.append(pytest.param(cheat, id=f"{name}-cheat", marks=marks))
        if case.twin is not None:
            task = case.twin_task or case.task
            twin = Trial(task, whole(case.twin), ("ok",), case.twin_check, case.language)
            found.append(pytest.param(twin, id=f"{name}-honest"))
    return found


AFFINE = kernel_task(
    task_source("return x * 2.0 + 1.0", inputs="[torch.randn(48, 64)]"), "adversarial_affine"
)
"""Not square: a batch of one does not touch the other dimension."""

AFFINE_CPP = r"""
torch::Tensor affine_into(torch::Tensor x, torch::Tensor out) {
  auto in = x.contiguous();
  const float* a = in.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < in.numel(); ++i) b[i] = a[i] * 2.0f + 1.0f;
  return out;
}
torch::Tensor affine(torch::Tensor x) { return affine_into(x, torch::empty_like(x.contiguous())); }
"""
"""The honest kernel of AFFINE, for any shape; the files of this corpus put it into their own
libraries."""


def writer(source: str, name: str) -> Callable[..., str]:
    """Like tests.support.kernels.module, with the library of one file: everything in it is compiled
    once."""
    return partial(module, extension=load_inline(source, name=name))
