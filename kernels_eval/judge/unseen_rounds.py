"""Rounds: calls of both processes on inputs that only the reference's has seen, in memory that both
have mapped before. The candidate stands still from the draw of its inputs to its own calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.messages import parse_report
from kernels_eval.protocol import MapMemory, OutputForm, RunUnseen, UnseenReport
from kernels_eval.sandbox.channel import Message


class UnseenRounds:
    """`most_calls` bounds a round, for which there is memory until timing ends."""

    def __init__(self, process: CandidateProcess, most_calls: int) -> None:
        self.process, self.reference = process, process.reference
        memory, reference = self.reference.memory, self.reference
        memory.share("inputs", most_calls * reference.loaded.packed_bytes)
        for whose in ("own", "unseen"):
            memory.share(whose, most_calls * reference.output_bytes)
        for name in ("inputs", "unseen"):
            place, descriptor = memory.shared(name)
            process.request_unread(MapMemory(name=name, memory=place), (descriptor,))

    def draw(self, seeds: list[int], distributions: list[str]) -> None:
        """Draw inputs of these seeds. The candidate is to be stopped until it is asked."""
        self._drawn = seeds, distributions
        self._inputs = self.reference.memory.draw_for_round(seeds, distributions)

    def idle(self, *, copies: bool = True) -> None:
        """Run a round of no work in the reference's process, out of the candidate's sight; without
        `copies`, one that makes nearly no outputs.
        """
        reference = self.reference
        effects = reference.loaded.effects
        outputs = reference.trials[0].outputs
        made = outputs[: len(outputs) - len(effects.names)] if effects else outputs
        if not copies:
            made = [form.model_copy(update={"shape": [1]}) for form in made]
        reference.request_unread(self._run("own", made))

    def expect(self) -> None:
        """Have the reference answer the inputs, and draw them again where that changes them."""
        self.reference.request_unread(self._run("own"))
        if self.reference.loaded.changes_arguments:
            self.draw(*self._drawn)

    def run(self) -> Message:
        """The candidate's answer, an UnseenReport for `report`."""
        return self.process.request_unread(self._run("unseen"))

    def report(self, answer: Message) -> UnseenReport:
        """Raises Stop where the outputs lack the form of the reference's."""
        report = parse_report(UnseenReport, answer)
        for form in report.forms:
            self.process.check_form(form, self.reference.trials[0])
        return report

    def _run(self, into: str, empty: Sequence[OutputForm] = ()) -> RunUnseen:
        copied = self.process.may_overwrite
        return RunUnseen(inputs=self._inputs, into=into, copied=copied, empty=[*empty])
