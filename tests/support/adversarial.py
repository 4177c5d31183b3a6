"""The form of the adversarial corpus: one case is a cheat, the reasons it may end with, and a
near-twin that is honest.

Guarantees: every case is judged on status and reason; a twin is always judged as `correct`. The
numbers of threats are those of the list in docs/explanation/verification.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import yaml

from kernels_eval.flags import meaning_of
from kernels_eval.records import STATUS_OF, KernelTask, Language, Verdict
from tests.support.kernels import (
    functions_in,
    kernel_task,
    load_inline,
    module,
    task_source,
)

CORPUS = Path(__file__).parents[1] / "data/adversarial"
GPU_CORPUS = CORPUS.with_name("adversarial_gpu")
"""A YAML file for each group of threats: its cases, its own tasks, and beside it the C++ library
that its candidates share."""
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
    slow: bool = False
    """Run by `make test-slow` alone, as are those of a page that says so."""
    deadline_s: float | None = None
    """Of the test of the cheat: for attacks whose failure is that the verifier never comes to an
    end."""

    @property
    def needs_gpu(self):
        return self.language.needs_gpu


@dataclass(frozen=True)
class Trial:
    """One candidate to judge: a case's cheat or its twin."""

    task: KernelTask
    code: str
    expect: tuple[str, ...]
    check: Check | None
    language: Language

    def assert_judged(self, verify):
        verdict = verify(self.task, self.code, language=self.language)
        seen = f"{verdict.status.value}/{verdict.reason}: {verdict.detail}\n{verdict.log_tail}"
        assert verdict.reason in self.expect, f"expected {' or '.join(self.expect)}, saw {seen}"
        assert verdict.status is STATUS_OF[verdict.reason]
        assert all(map(meaning_of, verdict.flags)), verdict.flags
        assert (verdict.timing is not None) == (verdict.reason == "ok")
        if self.check:
            self.check(verdict)


def trials(cases, write):
    """Pytest parameters with ids such as `t07-fallback-cheat`. Cases of one task follow each other:
    its reference is loaded once. `write` makes a candidate of the body of a `forward`."""
    cases = list(cases)

    def whole(code):
        return code if "class ModelNew" in code else write(code)

    order = list(dict.fromkeys(case.task.task_id for case in cases))
    found = []
    for case in sorted(cases, key=lambda case: order.index(case.task.task_id)):
        expect = (case.expect,) if isinstance(case.expect, str) else case.expect
        name = f"t{case.threat:02d}-{case.name}"
        cheat = Trial(case.task, whole(case.code), expect, case.check, case.language)
        slow = [pytest.mark.slow] if case.slow else []
        marks = [*slow, *([pytest.mark.timeout(case.deadline_s)] if case.deadline_s else [])]
        found.append(pytest.param(cheat, id=f"{name}-cheat", marks=marks))
        if case.twin is not None:
            task = case.twin_task or case.task
            twin = Trial(task, whole(case.twin), ("ok",), case.twin_check, case.language)
            found.append(pytest.param(twin, id=f"{name}-honest", marks=slow))
    return found


AFFINE = kernel_task(
    task_source("return x * 2.0 + 1.0", inputs="[torch.randn(48, 64)]"), "adversarial_affine"
)
"""Not square: a batch of one does not touch the other dimension."""

NOW = "torch.cuda.current_stream().cuda_stream"
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


def writer(source, name):
    """Like tests.support.kernels.module, with the library of one file: everything in it is compiled
    once."""
    return partial(module, extension=load_inline(source, name=name))


def cases_of(page, write=None):
    """The cases of one file of the corpus. `write` makes a candidate of its parts, with the current
    stream's handle for @NOW@.

    A candidate is the body of a `forward`, or parts of tests.support.kernels.module, perhaps with
    another `library` or another `base` class, or a whole `source`.
    """
    read = yaml.safe_load(page.read_text(encoding="utf-8"))
    tasks = {"affine": AFFINE}
    for name, parts in read.get("tasks", {}).items():
        tasks[name] = kernel_task(task_source(**parts), f"adversarial_{name}")

    def written(given):
        parts = {"forward": given} if isinstance(given, str) else dict(given)
        if write:
            return write(**{name: text.replace("@NOW@", NOW) for name, text in parts.items()})
        library = parts.pop("library", page.stem)
        source = AFFINE_CPP + (CORPUS / f"{library}.cpp").read_text(encoding="utf-8")
        if whole := parts.get("source"):
            functions = repr(functions_in(source))
            return whole.replace("@SOURCE@", repr(source)).replace("@FUNCTIONS@", functions)
        base = parts.pop("base", "nn.Module")
        text = writer(source, f"adversarial_{library}")(**parts)
        return text.replace("ModelNew(nn.Module)", f"ModelNew({base})")

    def checked(given):
        name, *arguments = [given] if isinstance(given, str) else given
        return partial(globals()[name], arguments) if arguments else globals()[name]

    how = {"task": tasks.get, "twin_task": tasks.get, "cheat": written, "twin": written}
    how |= {"check": checked, "twin_check": checked}
    how["expect"] = lambda given: given if isinstance(given, str) else tuple(given)
    cases, language = [], Language(read.get("language", "cpp"))
    for row in read["cases"]:
        fields = {name: how.get(name, lambda given: given)(value) for name, value in row.items()}
        fields.setdefault("slow", read.get("slow", False))
        cases.append(Case(code=fields.pop("cheat"), language=language, **fields))
    return cases


# -- what is asked of a verdict besides its reason -------------------------------------------------


def matches(verdict):
    assert verdict.outputs_match and verdict.correct_any and not verdict.correct_custom


def library_calls(verdict):
    return {name.removeprefix("aten.").strip("_") for name in verdict.library_calls}


def names(operators, verdict):
    assert library_calls(verdict) & set(operators), verdict.library_calls


def names_none(operators, verdict):
    assert not library_calls(verdict) & set(operators), verdict.library_calls


def flagged(flags, verdict):
    never_vary = {flag for flag in verdict.flags if flag.endswith("never_vary")}
    assert never_vary == set(flags), verdict.flags


def flagged_at_most(verdict):
    assert not any("global_state" in flag for flag in verdict.flags)


def log_is_bounded(verdict):
    assert len(verdict.log_tail.encode()) <= 8192


def passes_the_loose_tolerance(verdict):
    assert verdict.correctness is not None and verdict.correctness.kernelbench_1e2, (
        "the case is one that allclose(1e-2) lets pass"
    )


def says_that_other_shapes_are_refused(verdict):
    assert "declared_shape_only" in verdict.flags


def says_that_the_output_is_expanded(verdict):
    assert "expanded_output" in verdict.flags


def says_that_it_is_another_formula(verdict):
    assert verdict.detail.startswith("another formula")


def bounded(verdict):
    timing = verdict.timing
    assert timing is None or timing.candidate_ms >= 0.8 * timing.clock_bound_ms


def nothing_but_a_log_line(verdict):
    assert '"speedup": 1000.0' in verdict.log_tail or verdict.log_tail == ""
    assert verdict.timing is not None and verdict.timing.speedup < 1000


def flagged_non_finite(wanted, verdict):
    assert ("non_finite_inputs_differ" in verdict.flags) == (wanted == ["yes"]), verdict.flags


def says_that_weights_do_not_map(verdict):
    assert "weights_not_mappable" in verdict.flags


def says_names_that_print(verdict):
    assert any(name.startswith("dnnl::") for name in verdict.library_calls)
    assert all(name.isprintable() and len(name) <= 200 for name in verdict.library_calls)
