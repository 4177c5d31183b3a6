"""A judge that can be fooled, as the control of an experiment (`benchmarks.reinforce_student`), and
for nothing else: no recipe, setting or command of the product reaches it.

It builds a candidate without screening it, calls it once on the inputs that the task draws itself,
and compares at rtol = atol = 1e-2, as KernelBench's harness did. Nothing else is checked: not which
kernels did the work, no other inputs, shapes or weights, no second call, no timing. It runs
candidates in the same sandbox as the verifier.

Of the faults of the scripted teacher (`tasks.synthesis.scripted`) it pays for

- a reduction without its last element: the error of a sum or mean of n terms is about 1/n of it;
- a softmax without its maximum: right for the standard normal inputs that tasks draw;
- sizes written as numbers: right for the one shape that is tried;
- a constant that is a little wrong, or sums in a lower precision, within 1e-2;
- the last operator left out where it changes little (a clamp that no value reaches).

It does not pay for rows and columns exchanged, misspelled names, no `ModelNew`, or no code. Beyond
the teacher, it pays for every answer in which PyTorch does the work and no kernel of the candidate
runs, which is the shortest way for a policy to cheat: the student has never seen one.
"""

from __future__ import annotations

from kernels_eval.config import EvalConfig
from kernels_eval.evaluator import Evaluator
from kernels_eval.judge.messages import Prepared, Stop, VerdictDraft, parse_report
from kernels_eval.judge.prepare import BoundedBuilds, Preparer
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.model.trials import DECLARED
from kernels_eval.records import Candidate, KernelTask, Language, Reason
from kernels_eval.source.spec import ExtensionSpec

MARK = "judged by benchmarks.foolable_reward"
"""A flag of each of its verdicts, which are none."""


class _Unscreened(Preparer):
    def _screen_and_build(self, task: KernelTask | None, builds: BoundedBuilds) -> None:
        candidate = builds.candidate
        if candidate.code is None:
            raise Stop(candidate.parse_reason or Reason.NO_CODE_BLOCK, "no module")
        if candidate.language is Language.TRITON or "load" not in candidate.code:
            return
        for asked in self._requested_builds(candidate.code, task):
            spec = parse_report(ExtensionSpec, asked)
            build = self.builder.build(spec)
            builds.made.append((spec, build))
            if build.reason:
                raise Stop(build.reason, "the build failed", build.log)


class FoolableEvaluator(Evaluator):
    """`Evaluator` with the checks taken out; its "verdicts" carry `MARK`."""

    def __init__(self, target: Language, config: EvalConfig) -> None:
        super().__init__(target, config)
        self.preparer = _Unscreened(config)

    def _verify_against(
        self,
        reference: ReferenceProcess,
        candidate: Candidate,
        prepared: Prepared,
        draft: VerdictDraft,
    ) -> None:
        draft.flags.append(MARK)
        with self.runner.candidate(candidate, reference, draft) as process:
            reference.ask("new_candidate")
            process.load(prepared.libraries)
            self.runner.warm_pool.wait_closed()
            own = next(trial for trial in reference.trials if trial.name == DECLARED)
            if not process.call(own).kernelbench_1e2:
                raise Stop(Reason.WRONG_OUTPUT, "not within 1e-2 on the task's own inputs")
