"""The first loop over the table of trials: the reference computes what is right in each that suits
the task, its own inputs first. A task that cannot tell right from wrong ends as a `Stop`."""

from __future__ import annotations

import secrets
from typing import Literal, Protocol

from kernels_eval.config import (
    DECISION_TRIALS,
    EXPECTED_MAX_BYTES,
    LEAST_DISTRIBUTIONS,
    LEAST_IN_A_ROW,
    SHARED_ALIGNMENT,
)
from kernels_eval.judge.conditions import (
    has_settings,
    is_exact_near_zero,
    takes_exp,
    takes_infinities,
)
from kernels_eval.judge.gates import TaskGates
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.quarantine import (
    MEAN,
    ZEROS,
    constant_passes,
    degenerate,
    few_trials,
    quarantine_degenerate,
)
from kernels_eval.judge.trial import Stage, TaskFindings, Trial, TrialRow, enough_finite
from kernels_eval.judge.trials import AS_IMPULSE, rows_of
from kernels_eval.protocol import (
    DECISIONS,
    DECLARED,
    DOMAINS,
    FEW,
    FEW_SLICES,
    LASTING_STATES,
    MUTATED,
    NON_FINITE,
    REACHED,
    SHIFTED_WEIGHTS,
    A,
    Expectation,
    FindDecisive,
    FindFaint,
    FindFree,
    FindIgnoredInputs,
    FindLasting,
    FindReach,
    FindSettings,
    FindShifted,
    FindStructures,
    FindUnvaried,
    ForgetTrial,
    Request,
    domain_of,
)

SEARCHED = TrialRow("searched", grades_task=False, differs=True, steady=True, other_forms=True)
"""Inputs that are searched, not drawn."""


class Reference(Protocol):
    """The reference process's answers. Raises Stop (REFERENCE_FAILED)."""

    def request(self, request: Request[A], /) -> A: ...

    def answer_if_suitable(self, request: Request[A], name: str = "", /) -> A | None: ...


class Expectations:
    def __init__(self, reference: Reference, gates: TaskGates, task: TaskFindings) -> None:
        self.reference, self.gates, self.task = reference, gates, task
        self.output_bytes = 0
        self.reach_known = self.free_known = False
        self.flags: list[str] = []
        """what the task does not tell, once all values are there"""
        self._declared, *self._others = rows_of(task.config, task.level)

    def declare(self) -> None:
        """Compute what is right on the task's own inputs. Raises Stop (task_error)."""
        self._expect_row(self._declared)

    def complete(self) -> None:
        """Compute all other values. Raises Stop (task_error), or what the reference raises once
        it has begun again."""
        self._find_structures()
        if any(note.varied == "number" for note in self.task.loaded.plan.notes):
            self._find_reach()
        self._expect_rows([row for row in self._others if row.grades_task])
        loosest = self.gates.loosest
        try:
            self.flags = quarantine_degenerate(self.task, self.gates, self._ignored)
        except Stop:
            # the rows of screening may tell nothing of a task that all rows tell enough of
            every = rows_of(self.task.config, "confirm")
            asked = {trial.name for trial in self.task.trials}
            more = [row for row in every if row.grades_task and row.name not in asked]
            if self.task.level == "confirm" or not more:
                raise
            self.gates.loosest = loosest
            self._expect_rows(more)
            self.flags = quarantine_degenerate(self.task, self.gates, self._ignored)
        if self.task.level == "confirm":
            self._find_settings()
        self._expect_rows([row for row in self._others if not row.grades_task])
        if self.task.level == "confirm":
            self._expect_shifted()
        if self.task.level == "confirm" and self.task.loaded.plan.notes:
            self._expect_lasting_states()
            self._expect_faint()
            self._expect_decisions()
            self.flags += self._unvaried()
        screens, loaded = self.task.level == "screen", self.task.loaded
        left = [*loaded.attributes, *(loaded.kept if screens else ())]
        self.flags += [f"attribute_not_compared:{name}" for name in left]
        self.flags += ["few_trials"] if few_trials(self.task) else []

    @property
    def most_output_bytes(self) -> int:
        """Of any trial: with two more of what an integer counts, outputs are larger."""
        return self.output_bytes * (3 if has_settings(self.task) else 1)

    @property
    def doubtful(self) -> bool:
        """Whether the declared answer is like that of a task which cannot tell right from wrong."""
        declared = {DECLARED: self.task.expected[DECLARED]}
        one_row = any(output.shape[:1] in ([], [1]) for output in self.task.trials[0].outputs)
        constants = (ZEROS,) if one_row else (ZEROS, MEAN)
        return any(constant_passes(declared, self.gates, each) for each in constants)

    @property
    def bit_identical(self) -> bool:
        return all(seen.bit_identical for seen in self.task.expected.values())

    @property
    def oracle(self) -> Literal["float64", "float32"]:
        """float32 where any trial's is."""
        return min(seen.oracle for seen in self.task.expected.values())

    def _expect_rows(self, rows: list[TrialRow]) -> None:
        attempted = 0
        for row in rows:
            if not row.when(self.task):
                continue
            if row.configured:
                if attempted >= self._most_distributions(rows):
                    continue
                attempted += 1
            self._expect_row(row)

    def _most_distributions(self, rows: list[TrialRow]) -> int:
        room = EXPECTED_MAX_BYTES // max(3 * self.output_bytes, 1)
        others = [row for row in rows if row.required and row.when(self.task)]
        return max(0, max(LEAST_DISTRIBUTIONS, room) - 2 - len(others))

    def _expect_row(self, row: TrialRow) -> None:
        scopes = self.task.scopes
        if not row.tail:
            self._expect_shape(row, row.shape)
        # a scope that the task has refused is asked for no more
        while row.tail and scopes and not self._expect_shape(row, f"{scopes[0]}_{row.tail}"):
            scopes.pop(0)

    def _expect_shape(self, row: TrialRow, shape: str) -> bool:
        if shape not in (DECLARED, *self.task.loaded.plan.shapes):
            return False
        forms = self._forms(row, shape)
        for trial in forms:
            if domain_of(trial.distribution):
                self._find_free()
            if domain_of(trial.distribution) == REACHED and not self._find_reach():
                continue
            needed = row.required and trial is forms[-1]
            if self._expect_trial(trial, needed=needed):
                return True
        return False

    def _expect_trial(self, trial: Trial, *, needed: bool = False) -> bool:
        seen = self._expect_own(trial) if needed else self._expect_if_suitable(trial)
        if seen:
            self._add(trial, seen)
        return bool(seen)

    def _forms(self, row: TrialRow, shape: str) -> list[Trial]:
        name = row.name if shape == DECLARED else shape
        seed = self.task.trials[0].seed if row.same_seed else secrets.randbits(31)
        if row.weights:
            seeds = {form: secrets.randbits(31) for form in row.weights}
            return [Trial(name, row, seed, weights=x, weights_seed=y) for x, y in seeds.items()]
        drawn = [(self.task.impulse or DECLARED) if x == AS_IMPULSE else x for x in row.draws]
        if row.domains:  # what is hard is tried where others are accepted
            domains = self.task.domains[: 1 if row.hard else None]
            drawn = [f"{draw}{domain}" for domain in domains for draw in drawn]
        if row.draws[0].startswith(MUTATED):
            drawn = [self._mutation(draw) for draw in drawn]
        if row.alike:
            few = f"{MUTATED}_{secrets.randbits(31)}{FEW}"
            draws = tuple(few if draw == FEW_SLICES else draw for draw in row.alike)
            same = (seed,) * len(draws)
            return [Trial(name, row, seed, earlier_seeds=same, earlier_draws=draws)]
        calls = min(row.earlier, max(LEAST_IN_A_ROW, self.task.loaded.long_row) - 1)
        earlier = tuple(secrets.randbits(31) for _ in range(calls))
        return [
            Trial(name, row, seed, distribution=draw, shape=shape, earlier_seeds=earlier)
            for draw in drawn
        ]

    def _expect_decisions(self) -> None:
        """Add trials that ask for what others seldom ask for, and say which lines none asks for."""
        seed, lines, most = (
            secrets.randbits(31),
            list[int](),
            len(self.task.trials) + DECISION_TRIALS,
        )
        for name in DECISIONS:
            asked = [trial.name for trial in self.task.trials if asks(trial)]
            request = FindDecisive(trials=asked, seed=seed, domain=self.task.domains[0])
            found = self.reference.answer_if_suitable(request)
            lines = found.lines if found else []
            if not found or not found.distribution or len(self.task.trials) == most:
                break
            self._expect_trial(Trial(name, SEARCHED, found.seed, distribution=found.distribution))
        self.flags += [f"decision_not_reached:{line}" for line in lines]

    def _expect_lasting_states(self) -> None:
        """Add trials of inputs that hold a state for long."""
        seed = secrets.randbits(31)
        request = FindLasting(seed=seed, domain=self.task.domains[0])
        found = self.reference.answer_if_suitable(request)
        for name, drawn in zip(LASTING_STATES, found.found if found else (), strict=False):
            self._expect_trial(Trial(name, SEARCHED, seed, distribution=drawn))

    def _expect_shifted(self) -> None:
        """Add trials of weights far from where a constructor makes them."""
        if not self.task.loaded.parameters:
            return
        seed, weights_seed = self.task.trials[0].seed, secrets.randbits(31)
        request = FindShifted(seed=seed, weights_seed=weights_seed)
        found = self.reference.answer_if_suitable(request)
        for name, form in zip(SHIFTED_WEIGHTS, found.found if found else (), strict=False):
            trial = Trial(name, SEARCHED, seed, weights=form, weights_seed=weights_seed)
            self._expect_trial(trial)

    def _expect_faint(self) -> None:
        """Add trials of inputs on which the answer is tiny, and has all digits."""
        if not self.task.inputs_vary or not is_exact_near_zero(self.task):
            return
        seed = self.task.trials[0].seed
        request = FindFaint(seed=seed, apart=takes_exp(self.task))
        found = self.reference.answer_if_suitable(request)
        for drawn in found.found if found else ():
            name = drawn.partition("_")[0]
            self._expect_trial(Trial(name, SEARCHED, seed, distribution=drawn))

    def _find_structures(self) -> None:
        """Learn in which structures the task takes arguments that it refuses otherwise."""
        if not self.task.loaded.plan.notes:
            return
        request = FindStructures(seed=self.task.trials[0].seed)
        if found := self.reference.answer_if_suitable(request):
            self.task.loaded = self.task.loaded.model_copy(update={"plan": found.plan})

    def _find_settings(self) -> None:
        """Learn which other arguments the task's constructor takes."""
        request = FindSettings(seed=self.task.trials[0].seed)
        if found := self.reference.answer_if_suitable(request):
            self.task.settings = tuple(found.found)

    def _find_free(self) -> None:
        """Learn which arguments may be any numbers where not all may, before any draw in a
        domain."""
        if not self.free_known:
            request = FindFree(seed=self.task.trials[0].seed)
            if found := self.reference.answer_if_suitable(request):
                self.task.loaded = self.task.loaded.model_copy(update={"plan": found.plan})
            self.free_known = True

    def _find_reach(self) -> bool:
        """Learn how far arguments may leave their declared ranges; whether any tensor may."""
        if not self.reach_known:
            request = FindReach(seed=self.task.trials[0].seed)
            if found := self.reference.answer_if_suitable(request):
                self.task.loaded = self.task.loaded.model_copy(update={"plan": found.plan})
            self.reach_known = True
        return any(note.vary and note.reach for note in self.task.loaded.plan.notes)

    def _unvaried(self) -> list[str]:
        """A flag for each argument that is as declared in every trial."""
        trials = [x.name for x in self.task.trials if x.own_mode and x.distribution != DECLARED]
        if not trials:
            return []
        found = self.reference.request(FindUnvaried(trials=trials))
        return [f"argument_never_varies:{index}" for index in found.arguments]

    def _ignored(self) -> list[str]:
        """A flag for each argument that changes no answer."""
        if not self.task.loaded.plan.notes:
            return []
        request = FindIgnoredInputs(seed=self.task.trials[0].seed)
        found = self.reference.answer_if_suitable(request)
        return [f"task_ignores_input:{index}" for index in found.ignored] if found else []

    def _mutation(self, draw: str) -> str:
        """Under a seed of its own, in the widest domain that the task has accepted."""
        form = draw.removeprefix(MUTATED)
        return f"{MUTATED}_{secrets.randbits(31)}{form}{self.task.domains[0]}"

    def _expect_own(self, trial: Trial) -> Expectation:
        seen = self.reference.request(trial.expect())
        if not seen.deterministic:
            raise degenerate("two runs of the reference on the same inputs differ")
        if not seen.finite_share:
            raise degenerate("the reference's output on its own inputs holds no finite number")
        return seen

    def _expect_if_suitable(self, trial: Trial) -> Expectation | None:
        """Expected values of a variation; None where unsuitable."""
        seen = self.reference.answer_if_suitable(trial.expect(), trial.name)
        if seen is None:
            return None
        declared = self.task.expected[DECLARED]
        if trial.row.stage is not Stage.VARIATIONS and seen.shapes != declared.shapes:
            self.task.shapes_vary = True
        if not trial.suits(seen, declared, takes_infinities=takes_infinities(self.task)):
            self.reference.request(ForgetTrial(trial=trial.name))
            return None
        return seen

    def _add(self, trial: Trial, seen: Expectation) -> None:
        trial.outputs = seen.outputs
        if trial.row.differs and DECLARED in seen.equals:
            return
        if trial.row.telling and constant_passes({trial.name: seen}, self.gates):
            return
        size = sum(padded_bytes(output.bytes) for output in trial.outputs)
        if trial.name == DECLARED:
            self.output_bytes = size
        if size > self.most_output_bytes:
            return
        self.task.trials.append(trial)
        declared = self.task.expected.get(DECLARED, seen)
        trial.regular = seen.shapes == declared.shapes and enough_finite(seen, declared)
        if trial.row.domains:  # a wider one that the task has refused is asked for no more
            self.task.domains = DOMAINS[DOMAINS.index(domain_of(trial.distribution)) :]
        if trial.row.grades_task and trial.regular:
            self.task.expected[trial.name] = seen


def asks(trial: Trial) -> bool:
    """Whether a candidate that decides otherwise is wrong there, or flagged: in the task's own
    shape and mode, where integers count and numbers are finite."""
    return trial.own_mode and not trial.row.hard and trial.distribution != NON_FINITE


def padded_bytes(size: int) -> int:
    return -(-size // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
