"""Candidates and the verdicts that they must get, as tables: the adversarial corpus, where a case
is a cheat and a near-twin that is honest, and other verdicts.

Guarantees: every case is judged on status and reason; a twin is always judged as `correct`. The
numbers of threats are those of the list in docs/explanation/verification.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from kernels_eval.config import EvalConfig
from kernels_eval.records import KernelTask, Language, Verdict
from tests.support.kernels import (
    OWN_TMP,
    QUICK,
    assert_reason,
    functions_in,
    kernel_task,
    load_inline,
    module,
    task_source,
)

DATA = Path(__file__).parents[1] / "data"
CORPUS, GPU_CORPUS, VERDICTS, GPU_VERDICTS = (
    DATA / name for name in ("adversarial", "adversarial_gpu", "verdicts", "verdicts_gpu")
)
"""A YAML file for each group: its cases, its own tasks, and beside it the C++ or CUDA library that
its candidates share."""


@dataclass(frozen=True)
class Trial:
    """One candidate to judge. More than one reason only where chance decides."""

    name: str
    threat: int | None
    honest: bool
    task: KernelTask
    code: str
    expect: tuple[str, ...]
    check: Callable[[Verdict], None] | None
    language: Language
    config: EvalConfig
    timed: bool
    quick: bool
    """Run by `make test`, as are those of a page that says so; any other by `make test-slow`."""
    deadline_s: float | None
    """Of the test: for attacks whose failure is that the verifier never comes to an end."""

    def assert_judged(self, verify):
        import pytest

        if "/tmp" in self.code and not OWN_TMP:
            pytest.skip("a child shares /tmp with this checkout or its builds")
        verdict = verify(self.task, self.code, language=self.language, timed=self.timed)
        assert_reason(verdict, *self.expect, timed=self.timed)
        if self.check:
            self.check(verdict)


def parameters(trials):
    """Pytest parameters. Candidates of one task follow each other: its reference is loaded once."""
    import pytest

    order = list(dict.fromkeys((trial.config, trial.task.code) for trial in trials))
    for trial in sorted(trials, key=lambda trial: order.index((trial.config, trial.task.code))):
        marks = [] if trial.quick else [pytest.mark.slow]
        if trial.deadline_s:
            marks.append(pytest.mark.timeout(trial.deadline_s))
        yield pytest.param(trial, id=trial.name, marks=marks)


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
"""The honest kernel of the task `affine`, for any shape: a part of every C++ library here."""


@dataclass(frozen=True)
class Page:
    """One file. A candidate is the body of a `forward`, or parts of tests.support.kernels.module,
    perhaps with another `library` or another `base` class, or a whole `source`, or what takes the
    place of a name in that one of the page's `sources`.

    In any part @SOURCE@ stands for the library's source, @FUNCTIONS@ for what it defines,
    @EXTENSION@ for the call that builds it, and @NOW@ for the current stream's handle. What must be
    correct is timed only where the page, or its case, says `timed`; what may be refused always is.
    """

    path: Path
    read: dict

    @property
    def trials(self):
        return [trial for row in self.read["cases"] for trial in self._trials(row)]

    def _trials(self, row):
        """A cheat and its twin; of another verdict the `candidate` alone."""
        threat = row.get("threat")
        name = f"t{threat:02d}-{row['name']}" if threat else f"{self.path.stem}-{row['name']}"
        cheat = row.get("cheat", row.get("candidate"))
        expect = row.get("expect", "ok")
        yield self._trial(
            row,
            name=f"{name}-cheat" if threat else name,
            honest="candidate" in row and expect == "ok",
            code=cheat,
            expect=(expect,) if isinstance(expect, str) else tuple(expect),
            check=row.get("check"),
            deadline_s=row.get("deadline_s"),
        )
        if "twin" in row:
            yield self._trial(
                row,
                name=f"{name}-honest",
                honest=True,
                task=row.get("twin_task", row.get("task")),
                code=row["twin"],
                expect=("ok",),
                check=row.get("twin_check"),
            )

    def _trial(
        self, row, *, code, check, expect, task=None, honest=False, deadline_s=None, **fields
    ):
        config = QUICK.model_dump()
        for changes in (self.read.get("config", {}), row.get("config", {})):
            for name, value in changes.items():
                config[name] = config[name] | value if isinstance(value, dict) else value
        return Trial(
            threat=row.get("threat"),
            honest=honest,
            expect=expect,
            task=self._task(task or row.get("task", "affine")),
            code=self._written(code),
            check=checked(check) if check else None,
            language=Language(self.read.get("language", "cpp")),
            config=EvalConfig.model_validate(config),
            timed=expect != ("ok",) or row.get("timed", self.read.get("timed", False)),
            quick=row.get("quick", self.read.get("quick", False)),
            deadline_s=deadline_s,
            **fields,
        )

    def _task(self, name):
        parts = dict(self.read.get("tasks", {}).get(name) or AFFINE)
        constants = parts.pop("constants", "")
        fields = {"init_form": parts.pop("init_form")} if "init_form" in parts else {}
        return kernel_task(task_source(**parts) + f"\n{constants}", f"case_{name}", **fields)

    def _written(self, given):
        for name, text in self.read.get("sources", {}).items():
            if name in given:
                return text.replace(name, given[name])
        parts = {"forward": given} if isinstance(given, str) else dict(given)
        library = parts.pop("library", self.path.stem)
        base = parts.pop("base", "nn.Module")
        source, extension = self._library(library)
        names = {"@NOW@": "torch.cuda.current_stream().cuda_stream", "@EXTENSION@": extension}
        names |= {"@SOURCE@": repr(source), "@FUNCTIONS@": repr(functions_in(source))}
        for name, text in names.items():
            parts = {part: code.replace(name, text) for part, code in parts.items()}
        if "source" in parts:
            return parts["source"]
        code = module(**{"extension": extension} | parts)
        return code.replace("ModelNew(nn.Module)", f"ModelNew({base})")

    def _library(self, name):
        """Its source, and the call that builds it."""
        for folder in (self.path.parent, CORPUS):
            for path in (folder / f"{name}.cpp", folder / f"{name}.cu"):
                if path.exists():
                    options = self.read.get("options", {}).get(name, {})
                    text = path.read_text(encoding="utf-8")
                    cuda = path.suffix == ".cu"
                    source = text if cuda else AFFINE_CPP + text
                    return source, load_inline(source, f"case_{name}", cuda=cuda, **options)
        raise FileNotFoundError(f"{self.path.parent}: no library {name}")


AFFINE = {"forward": "return x * 2.0 + 1.0", "inputs": "[torch.randn(48, 64)]"}
"""Not square: a batch of one does not touch the other dimension."""


def trials_of(folder, pattern="*.yaml"):
    pages = [
        Page(path, yaml.safe_load(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob(pattern))
    ]
    return [trial for page in pages for trial in page.trials]


def checked(given):
    """A function below, by its name, perhaps with arguments."""
    name, *arguments = [given] if isinstance(given, str) else given
    return partial(globals()[name], arguments) if arguments else globals()[name]


# -- what is asked of a verdict besides its reason -------------------------------------------------


def detail_begins(given, verdict):
    assert verdict.detail.startswith(tuple(given)), verdict.detail


def detail_says(given, verdict):
    assert all(text in verdict.detail for text in given), verdict.detail


def says(given, verdict):
    assert all(text in verdict.detail + verdict.log_tail for text in given), verdict.detail


def ran_kernels(given, verdict):
    assert list(verdict.custom_kernels) == given
    assert verdict.device not in ("", "cpu")


def detail_says_nothing_of(given, verdict):
    assert not any(text in verdict.detail for text in given), verdict.detail


def has_a_share_of(given, verdict):
    assert verdict.custom_kernel_time_share >= given[0], verdict.library_calls


def log_says(given, verdict):
    assert all(text in verdict.log_tail for text in given), verdict.log_tail


def matches_with_flag(given, verdict):
    assert verdict.outputs_match and set(given) <= set(verdict.flags)


def matches_without_flag(given, verdict):
    assert verdict.outputs_match and not set(given) & set(verdict.flags)


def wrong(verdict):
    assert verdict.outputs_match is False and not verdict.correct_any


def built_by(given, verdict):
    assert [verdict.build_tier] == given


def judged_by_twelve_trials(verdict):
    """One of the twelve does not suit the task."""
    assert verdict.correctness is not None and verdict.correctness.trials == 12


def takes_no_input_for_ignored(verdict):
    assert not any(flag.startswith("task_ignores_input") for flag in verdict.flags)


def matches(verdict):
    assert verdict.outputs_match and verdict.correct_any and not verdict.correct_custom


def has_an_interval(verdict):
    timing = verdict.timing
    assert timing.calls_per_sample > 1, "one call is too short to be timed alone"
    assert timing.speedup_lower <= timing.speedup <= timing.speedup_upper
    assert timing.speedup_lower < timing.speedup_upper
    assert timing.candidate_ms >= 0.8 * timing.clock_bound_ms
    assert timing.pairs >= 6


def matches_by(given, verdict):
    matches(verdict)
    assert any(name in call for name in given for call in verdict.library_calls)


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


def says_that_its_copy_is_timed(verdict):
    assert "shared_output" in verdict.flags


def bounded(verdict):
    timing = verdict.timing
    assert timing is None or timing.candidate_ms >= 0.8 * timing.clock_bound_ms


def as_slow_as_its_rounds(verdict):
    timing = verdict.timing
    assert timing.candidate_ms >= 0.9 * timing.clock_bound_ms, timing


def no_faster(verdict):
    assert verdict.timing.speedup_lower < 1, verdict.timing


def nothing_but_a_log_line(verdict):
    assert '"speedup": 1000.0' in verdict.log_tail or verdict.log_tail == ""
    assert verdict.timing is not None and verdict.timing.speedup < 1000


def flagged_non_finite(wanted, verdict):
    assert ("non_finite_inputs_differ" in verdict.flags) == (wanted == ["yes"]), verdict.flags


def says_names_that_print(verdict):
    assert any(name.startswith("dnnl::") for name in verdict.library_calls)
    assert all(name.isprintable() and len(name) <= 200 for name in verdict.library_calls)
