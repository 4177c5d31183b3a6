"""Rounds: calls of both processes on inputs that only the reference's has seen, in memory that both
have mapped before. The candidate stands still from the draw of its inputs to its own calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels_eval.config import KEPT_BYTES
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.messages import parse_report
from kernels_eval.protocol import MapMemory, OutputForm, RunUnseen, UnseenReport
from kernels_eval.sandbox.channel import Message


class UnseenRounds:
    """`most_calls` bounds a round, for which there is memory until timing ends."""

    def __init__(self, process: CandidateProcess, most_calls: int) -> None:
        self.process, self.reference = process, process.reference
        memory, reference = self.reference.memory, self.reference
        memory.share(most_calls * reference.loaded.packed_bytes, "inputs")
        memory.share(most_calls * reference.output_bytes, "own", "unseen")
        for name in ("inputs", "unseen"):
            place, descriptor = memory.shared(name)
            process.request_unread(MapMemory(name=name, memory=place), (descriptor,))

    def draw(self, seeds: list[int], distributions: list[str], *, keeps: bool = True) -> None:
        """Draw inputs of these seeds. The candidate is to be stopped until it is asked. `keeps`:
        keep large outputs of a CPU, too, until all calls are made: each is then in no cache, as in
        no sample.
        """
        self._drawn = seeds, distributions
        in_cache = self.reference.output_bytes < KEPT_BYTES or self.reference.device.startswith(
            "cuda"
        )
        self._at_once = self.process.may_overwrite or not (keeps or in_cache)
        self._inputs = self.reference.memory.draw_for_round(seeds, distributions)

    def forms(self, *, copies: bool = True) -> list[OutputForm]:
        """Those of the outputs that a round makes; without `copies`, next to nothing."""
        outputs, effects = self.reference.trials[0].outputs, self.reference.loaded.effects
        made = outputs[: len(outputs) - len(effects.names)] if effects else outputs
        if not copies:
            return [form.model_copy(update={"shape": [1], "strides": []}) for form in made]
        if any(call.layout for call in self.process.calls):
            return made
        return [form.model_copy(update={"strides": []}) for form in made]

    def idle(self, forms: list[OutputForm]) -> None:
        """Run a round of no work in the reference's process, out of the candidate's sight."""
        self.reference.request_unread(self._run("own", forms))

    def expect(self) -> None:
        """Have the reference answer the inputs, and draw them again where that changes them."""
        with self.reference.trying_draws(self._drawn[1]):
            self.reference.request_unread(self._run("own"))
        if self.reference.loaded.changes_arguments:
            self._inputs = self.reference.memory.draw_for_round(*self._drawn)

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
        at_once = self._at_once
        return RunUnseen(inputs=self._inputs, into=into, at_once=at_once, empty=[*empty])
