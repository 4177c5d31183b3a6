"""The role that runs the untrusted kernel. Nothing of the task is here: inputs arrive as values in
shared memory. What it reports of itself is no evidence."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from secrets import randbelow
from types import ModuleType
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernels_eval.candidate import state
from kernels_eval.candidate.build_interception import BuildFailed, intercept, open_library
from kernels_eval.candidate.kernel_tracer import KernelTracer, Launches, registered_operators
from kernels_eval.candidate.refusals import refuse
from kernels_eval.config import (
    CORRUPT_VALUES,
    FENCE,
    INDIFFERENT_RTOL,
    LARGE_OUTPUT_BYTES,
    MOST_CUSTOM_KERNELS,
    MOST_OPERATORS,
    RERUN_S,
    SHARE_CALLS,
    SHARE_S,
    SPOILED_WALL,
    SYNCHRONISE_NS,
    TIMED_INPUT_BYTES,
    TRACED_CALLS,
)
from kernels_eval.model.inputs import (
    Arguments,
    flatten_outputs,
    load_candidate,
    made_elsewhere,
    moved,
)
from kernels_eval.model.measurement import all_close, few_of, same, same_all
from kernels_eval.model.model_runner import (
    Hooks,
    ModelRunner,
    described,
    layout_of,
    now_ns,
    poison_allocations,
    processor_ns,
    storages,
)
from kernels_eval.model.operators import (
    UNTRACED,
    compute_operators,
    traced_operators,
    watch_unrecorded,
)
from kernels_eval.model.renewals import unheld
from kernels_eval.model.shared_memory import Fences, Memory, copied, write
from kernels_eval.model.side_effects import lacking, numbers_after
from kernels_eval.model.values import flattened, leaves_of, map_tensors, rebuilt
from kernels_eval.model.weights import (
    copy_weights,
    digest_of,
    frozen_of,
    own_walk,
    parameters_of,
    running_statistics,
    squeezed,
)
from kernels_eval.protocol import (
    Call,
    CallReport,
    CopyWeights,
    Done,
    ErrorReport,
    Forget,
    KeepOwnNumbers,
    KeptReport,
    LateBuildAnswer,
    LoadCandidate,
    LoadReport,
    MeasureShare,
    ModelSpec,
    NameOperators,
    OperatorReport,
    OrnamentReport,
    PackedValues,
    PackKernels,
    ReadState,
    Rebuild,
    Reconstruct,
    RecordSample,
    ReplaceWritten,
    Sample,
    ShareReport,
    SpoilOutputs,
    StateReport,
    TakeTimingInputs,
    handles,
)
from kernels_eval.records import Reason
from kernels_eval.sandbox.channel import Channel, Message
from kernels_eval.sandbox.trees import named
from kernels_eval.source.spec import ExtensionSpec


class CandidateRole:
    outputs: Memory
    """Where the outputs of a compared call go."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        hooks = Hooks(
            count_calls=self.count_calls,
            around_pass=self.around_pass,
            after_construction=self._reset_threads,
            make_anew=self._made_anew,
        )
        self.runner = ModelRunner(channel, self.arguments, hooks)
        self.parts = self, self.runner
        self.libraries: dict[str, str] = {}
        self.previous: tuple[list[Tensor], list[Tensor]] = [], []
        self.last_inputs: list[object] = []
        self.fences = Fences()
        """Around these."""
        self.state: dict[str, str] = {}
        self.sets: list[list[object]] = []
        self.launches: Launches | None = None
        self._backward_calls = 0
        self._operators = 0
        """that Python called in a forward call"""
        self.refused: list[str] = []
        self.weights: Any = ()
        """that were copied, for a model that is made anew"""

    # -- loading -----------------------------------------------------------------------------------

    @handles(LoadCandidate)
    def load(self, request: LoadCandidate) -> LoadReport | ErrorReport:
        self.runner.spec = request.spec.model_copy(update={"entry_point": "ModelNew"})
        self.runner.gradients = self.runner.spec.gradients
        self.runner.effects = effects = self.runner.spec.effects
        self.runner.prepare_device(self.runner.spec.device, self.runner.spec.threads)
        (self._arguments,) = self.runner.unpacked(request.arguments)
        self._declared = self._arguments
        self.outputs = self.runner.memory(request.outputs)
        self.state = state.snapshot(self.runner.device)
        self.tracer = KernelTracer(self.runner.on_gpu)
        self.tracer.follows_graphs = self.runner.gradients is not None
        self.libraries = {**request.libraries}
        intercept(self._provide)
        self.language = request.language
        if request.kernels:
            self.unpack_kernels()
        self.language.watch(self.tracer)
        watch_unrecorded()
        self.refused = refuse(os.path.basename(request.path))
        self.runner.module = load_candidate(request.path)
        if not hasattr(self.runner.module, "ModelNew"):
            missing = "the module defines no ModelNew"
            return ErrorReport(error=Reason.MISSING_MODEL_NEW.value, detail=missing)
        model = self.runner.construct()
        if own := own_walk(model):
            said = f"{own} is its own, by which its weights are found: leave nn.Module's"
            return ErrorReport(error=Reason.FORBIDDEN_CALL.value, detail=said)
        elsewhere = made_elsewhere(model, self.runner.spec.construct_on)
        self.runner.model = moved(model, self.runner.device)
        self.runner.synchronise()
        parameters = parameters_of(self.runner.model)
        return LoadReport(
            parameters=list(map(squeezed, parameters.values())),
            parameter_names=list(parameters),
            parameter_digests=list(map(digest_of, parameters.values())),
            frozen=list(map(squeezed, frozen_of(self.runner.model).values())),
            statistics=list(map(squeezed, running_statistics(self.runner.model, renamed=True))),
            made_elsewhere=elsewhere,
            lacks=lacking(self.runner.model, effects) if effects else [],
            lacks_drawn=unheld(self.runner.model, self.runner.spec.drawn),
        )

    @handles(PackKernels)
    def pack_kernels(self, _: PackKernels) -> Done:
        folder = Path(os.environ[self.language.jit_cache])
        files = named(folder, "*")
        with os.fdopen(self.channel.descriptors.pop(0), "wb") as file, ZipFile(file, "w") as kept:
            kept.comment = str(folder).encode()
            for path in files:
                kept.write(path, path.relative_to(folder))
        return Done()

    def unpack_kernels(self) -> None:
        """Restore this source's compiled kernels; corrupted ones are compiled again."""
        folder = Path(os.environ[self.language.jit_cache])
        file = os.fdopen(self.channel.descriptors.pop(0), "rb")
        with file, suppress(BadZipFile, OSError, ValueError, RuntimeError), ZipFile(file) as kept:
            for name in kept.namelist():
                if not (folder / name).exists():  # else this process may have loaded it
                    kept.extract(name, folder)
            self.language.relocate(folder, kept.comment.decode())

    def arguments(self, spec: ModelSpec) -> Arguments:
        arguments: Arguments = copied(self._arguments)
        return arguments

    def _reset_threads(self) -> None:
        """Set the reference's thread count, whatever the module did; `read_state` tells of later
        changes.
        """
        torch.set_num_threads(self.runner.spec.threads)

    def _provide(self, spec: Message) -> ModuleType | str:
        key = ExtensionSpec.model_validate(spec).key
        path = self.libraries.get(key)
        if path is None or not os.path.exists(path):
            self.channel.send({"build": spec})
            answer = LateBuildAnswer.model_validate(self.channel.receive_record())
            if not answer.ok:
                raise BuildFailed(answer.reason or Reason.BUILD_FAILED, answer.log)
            path = self.libraries[key] = answer.path
        known = registered_operators()
        module = open_library(path, spec)
        if isinstance(module, ModuleType):
            self.tracer.wrap_module(module, module.__name__)
        self.tracer.wrap_operators(registered_operators() - known)
        if self.launches is None and self.runner.on_gpu and (launches := Launches.find()):
            launches.expect_stream(torch.cuda.default_stream().cuda_stream)
            self.launches = launches
        return module

    def count_calls(self) -> int:
        """Custom kernel launches so far, else calls of functions that hold them; with gradients, in
        backward passes.
        """
        return self._backward_calls if self.runner.gradients else self._launched

    @property
    def _launched(self) -> int:
        return self.launches.total if self.launches else self.tracer.calls.total()

    @contextmanager
    def around_pass(self, name: str) -> Iterator[None]:
        """With gradients, disturb what kernels write in backward passes alone: they must matter
        too.
        """
        before, forward = self._launched, name == "forward"
        self.tracer.paused = forward
        if self.launches:
            self.launches.pause(forward)
        try:
            yield
        finally:
            self.tracer.paused = False
            if self.launches:
                self.launches.pause(False)
        if not forward:
            self._backward_calls += self._launched - before

    def _made_anew(self) -> Any:
        """A model before its first call, which it may keep anywhere, with the weights of now."""
        runner, now = self.runner, self.runner.model
        model = runner.build()
        if self.weights:
            copy_weights(model, *self.weights)
        if runner.redrawn and runner.redrawn.seed is not None:
            runner.redraw(model, runner.redrawn, runner.redrawn.seed)
        return model.train(now.training) if isinstance(model, torch.nn.Module) else model

    def leaves(self, inputs: list[object]) -> list[Tensor]:
        found, _ = flatten_outputs(self.runner.forward(inputs))
        self.runner.synchronise()
        return [leaf.detach() for leaf in self._returned(found)]

    def _returned(self, leaves: list[Any]) -> list[Any]:
        effects = self.runner.effects
        return leaves[: len(leaves) - len(effects.names)] if effects else leaves

    @handles(Rebuild)
    def rebuild(self, _: Rebuild) -> Done:
        self.weights, self.runner.redrawn = (), None
        self.runner.model = self.runner.build()
        return Done()

    @handles(Reconstruct)
    def reconstruct(self, request: Reconstruct) -> Done:
        given = request.arguments
        (self._arguments,) = self.runner.unpacked(given) if given else [self._declared]
        return self.rebuild(Rebuild())

    @handles(CopyWeights)
    def copy_weights(self, request: CopyWeights) -> Done:
        (weights,) = self.runner.unpacked(request.weights)
        self.weights = copied(weights) if self.runner.remembers else ()
        copy_weights(self.runner.model, *weights)
        self.runner.synchronise()
        return Done()

    # -- inputs ------------------------------------------------------------------------------------

    def _receive(self, inputs: PackedValues, fences: Fences | None = None) -> None:
        self.runner.timed_inputs = []  # timing is over, or has not begun
        received = self.runner.unpacked(inputs)
        self.sets = [copied(values, fences) for values in received]
        self.runner.synchronise()  # the memory may go

    def fresh(self, index: int = 0) -> list[object]:
        inputs: list[object] = copied(self.sets[index])
        return inputs

    # -- one compared call -------------------------------------------------------------------------

    @handles(Call)
    def call(self, request: Call) -> CallReport:
        """One forward call. Outputs on other devices than those asked for are not copied, as that
        takes longer than everything else."""
        fences = Fences()
        self._receive(request.inputs, fences if request.fenced else None)
        (*earlier, drawn), self.sets = self.sets, []
        if request.in_place:
            self._reuse_storage(drawn)
            fences.add(self.fences)
        self.fences = fences
        given = self.runner.unchanged(drawn)
        before = map_tensors(torch.clone, given)
        self.runner.renew()  # what a constructor calls is no part of a call
        counted = self.count_calls()
        self.runner.earlier = earlier
        self.runner.between = self.last_inputs
        how = request.output_bytes, request.evaluate
        output, outstanding = self._poisoned(drawn, *how)
        self.runner.between = []
        leaves, structure = flatten_outputs(output)
        seen = {
            "custom_calls": self.count_calls() - counted,
            "overrun": not fences.intact,
            "mutated": not all(map(same, before, given)),
            "previous_changed": not same_all(*self.previous),
            "outstanding_share": outstanding,
        }
        weights = storages(self.runner.running)
        layout = layout_of(leaves, [drawn, self.previous[0]], weights)
        report = described(output, leaves, structure, layout=layout).model_copy(update=seen)
        if not report.plain or report.devices != request.devices:
            return report
        self.previous = [], []  # memory first: outputs can be gigabytes, and stay on their device
        once = report.mutated or len(given) < len(drawn)  # then the inputs are other ones
        del before, given, output
        saved = _copies(leaves)
        # as views: a caller may keep one, and let the tensor itself go
        self.previous, self.last_inputs = ([x.detach() for x in leaves], saved), drawn
        large = sum(x.nbytes for x in saved) > LARGE_OUTPUT_BYTES
        reruns = 0 if once else min(request.reruns, 1) if large else request.reruns
        started, differs = now_ns(), False
        for number in range(reruns):
            if number and now_ns() - started > RERUN_S * 1e9:
                break
            again, _ = flatten_outputs(self._poisoned(drawn, *how)[0])
            self.runner.synchronise()
            plain = all(type(x) is Tensor for x in again)
            differs = differs or not plain or not same_all(saved, again)
            saved = _copies([x for x in again if isinstance(x, Tensor)])
        write(self.outputs, [saved])
        self.runner.synchronise()
        return report.model_copy(update={"rerun_differs": differs})

    def _reuse_storage(self, inputs: list[object]) -> None:
        last = leaves_of(self.last_inputs)
        held = {x.untyped_storage().data_ptr() for x in last if isinstance(x, Tensor)}
        if any(leaf.untyped_storage().data_ptr() in held for leaf in self.previous[0]):
            # the previous output lives in the inputs (as an in-place reference's does): it is meant
            # to change
            self.previous = [], []
        if len(self.last_inputs) != len(inputs):
            return
        inputs[:] = map(_over, self.last_inputs, inputs)

    def _poisoned(
        self, inputs: list[object], output_bytes: int, evaluate: bool
    ) -> tuple[object, float]:
        self.runner.renew()
        model = self.runner.running
        module = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
        training = module.training
        if evaluate:
            module.eval()
        try:
            if not self.runner.on_gpu:
                poison_allocations(True)
                return self.runner.forward(inputs), 0.0
            self._poison_gpu(output_bytes)
            self.runner.synchronise()
            started = now_ns()
            output = self.runner.forward(inputs)
            torch.cuda.default_stream().synchronize()
            joined = now_ns()
            self.runner.synchronise()
            ended = now_ns()
            return output, max(0, ended - joined - SYNCHRONISE_NS) / max(1, ended - started)
        finally:
            poison_allocations(False)
            if evaluate:
                module.train(training)

    def _poison_gpu(self, output_bytes: int) -> None:
        free, _ = torch.cuda.mem_get_info()
        if output_bytes and 2 * output_bytes < free // 4:
            blocks = [
                torch.full((output_bytes,), FENCE, dtype=torch.uint8, device=self.runner.device)
                for _ in range(2)
            ]
            del blocks

    # -- timing ------------------------------------------------------------------------------------

    @handles(Forget)
    def forget(self, _: Forget) -> Done:
        self.previous, self.last_inputs, self.runner.timed_inputs = ([], []), [], []
        self.runner.held.clear()
        self.runner.shared = {}
        return Done()

    @handles(SpoilOutputs)
    def spoil_outputs(self, request: SpoilOutputs) -> Done:
        sets, before = self.runner.timed_inputs, list[Tensor]()
        began, worked = now_ns(), processor_ns()
        for number in range(request.calls if sets else 0):
            # of work: on a busy machine as much as on another
            spent = max(processor_ns() - worked, (now_ns() - began) / SPOILED_WALL)
            if spent > request.seconds * 1e9:
                break
            inputs = sets[number % len(sets)]
            leaves = tree_leaves(self.runner.forward(inputs))
            leaves = [x for x in leaves if type(x) is Tensor and x.layout is torch.strided]
            lent = storages(self.runner.running)
            if layout_of(leaves, inputs, lent) < 2:
                before = _spoil(leaves, before)
        self.runner.synchronise()
        return Done()

    def end_command(self, command: str) -> None:
        self.sets, self.runner.earlier = [], []  # they serve one command
        self.runner.trim_memory(command)

    @handles(TakeTimingInputs)
    def take_timing_inputs(self, request: TakeTimingInputs) -> Done:
        runner = self.runner
        large = runner.on_gpu and request.inputs.size > TIMED_INPUT_BYTES
        earlier = [] if large else runner.timed_inputs
        runner.timed_inputs = []  # the memory of large ones first
        received = runner.unpacked(request.inputs)
        if earlier:  # others come to the same places
            runner.timed_inputs = _over(earlier[: len(received)], received)
        else:  # on a GPU, where memory is dear, they stay where they are
            runner.timed_inputs = received if runner.on_gpu else list(map(copied, received))
        runner.synchronise()
        return Done()

    # -- how it works ------------------------------------------------------------------------------

    @handles(ReadState)
    def read_state(self, request: ReadState) -> StateReport:
        changed = state.changes(self.state, state.snapshot(self.runner.device))
        added = {name for name in self.tracer.own_operators if name.startswith(state.OWN_OF_TORCH)}
        if request.operators and (replaced := state.replaced_operators()):
            changed["operators"] = f"{replaced} of torch's own are replaced"
        if added:
            changed["operators"] = ", ".join(sorted(added))
        if self.refused:
            changed["refused"] = self.refused[0]
        return StateReport(changed=changed)

    @handles(KeepOwnNumbers)
    def keep_numbers(self, request: KeepOwnNumbers) -> KeptReport:
        self._receive(request.inputs)
        calls = [self.fresh(index) for index in range(len(self.sets))]
        found = numbers_after(self._made_anew(), calls, request.names)
        return KeptReport(before=found.before, after=found.after)

    @handles(NameOperators)
    def name_operators(self, request: NameOperators) -> OperatorReport:
        """The aten compute operators of one forward call, and the custom kernels seen so far."""
        self._receive(request.inputs)
        drawn, again = self.fresh(), self.fresh()
        self.runner.renew()
        operators = compute_operators(lambda: self.runner.forward(drawn))
        self._operators = len(operators)
        self.runner.renew()
        traced = self._traced(lambda: self.runner.forward(again))
        return self._operator_report({*operators, *traced})

    @handles(RecordSample)
    def record_sample(self, request: RecordSample) -> OperatorReport:
        calls = min(request.calls, max(1, TRACED_CALLS // (1 + self._operators)))
        return self._operator_report(self._traced(lambda: self.runner.sample(Sample(calls=calls))))

    def _traced(self, run: Callable[[], object]) -> set[str]:
        return traced_operators(run) if self._operators < TRACED_CALLS else {UNTRACED}

    def _operator_report(self, operators: set[str]) -> OperatorReport:
        operators -= self.tracer.own_operators
        self.runner.synchronise()
        names = self.launches.names() if self.launches else dict(self.tracer.calls.most_common())
        off_stream = self.launches.off_stream if self.launches else 0
        return OperatorReport(
            operators=sorted(operators)[:MOST_OPERATORS],
            custom=list(names)[:MOST_CUSTOM_KERNELS],
            off_stream=off_stream,
        )

    @handles(MeasureShare)
    def measure_share(self, request: MeasureShare) -> ShareReport:
        self._receive(request.inputs)
        shares: list[float] = []
        began = now_ns()
        while len(shares) < SHARE_CALLS and (not shares or now_ns() - began < SHARE_S * 1e9):
            drawn = self.fresh()
            self.runner.advance(1)
            self._time_kernels(True)
            try:
                total = self.runner.timed([drawn], cold=False)
                spent = (
                    self.launches.elapsed_ms() * 1e6 if self.launches else self.tracer.spent_ns()
                )
            finally:
                self._time_kernels(False)
            shares.append(min(1.0, spent / max(total, 1.0)))
        return ShareReport(share=sorted(shares)[len(shares) // 2])

    def _time_kernels(self, on: bool) -> None:
        if self.launches:
            self.launches.reset()
            self.launches.mode(timed=on)
        else:
            self.tracer.around = self.tracer.timed if on else None

    @handles(ReplaceWritten)
    def replace_written(self, request: ReplaceWritten) -> OrnamentReport:
        """Whether the output stays with replaced values; None where both sets of inputs have one
        answer.
        """
        self._receive(request.inputs)
        expected = _copies(self.leaves(self.fresh(0)))
        if same_all(expected, self.leaves(self.fresh(1))):
            return OrnamentReport(ornamental=None)
        found = self._is_indifferent(expected) or self._is_ornament(expected)
        return OrnamentReport(ornamental=found)

    def _is_indifferent(self, expected: list[Tensor]) -> bool:
        """Whether the answer survives other inputs' values, or kernels write a constant (no
        table).
        """
        tracer = self.tracer
        tracer.swapped.clear()
        self.runner.renew()
        try:
            with tracer.swapping(False):
                other = self.leaves(self.fresh(1))
            if all_close(expected, other, INDIFFERENT_RTOL):
                return False
            self.runner.renew()
            with tracer.swapping(True):
                leaves = self.leaves(self.fresh(0))
        except Exception:
            return False
        seen = tracer.swapped
        if not seen or seen["unseen"] or (seen["same"] and not seen["other"]):
            return False
        return not seen["other"] or all_close(expected, leaves, INDIFFERENT_RTOL)

    def _is_ornament(self, expected: list[Tensor]) -> bool:
        def unchanged(disturbed: AbstractContextManager[None]) -> bool | None:
            # memory and buffers that are used again hold another answer now: a write shows
            self.runner.forward(self.fresh(1))
            inputs = self.fresh(0)
            self.runner.renew()
            try:
                with disturbed:
                    leaves, _ = flatten_outputs(self._poisoned(inputs, output_bytes, False)[0])
                    self.runner.synchronise()
                    return same_all(expected, self._returned(leaves))
            except Exception:
                return None  # what the kernels made was used

        output_bytes = sum(x.nbytes for x in expected)
        passes = [(value, False) for value in CORRUPT_VALUES] + [(CORRUPT_VALUES[0], True)]
        for value, skip in passes:
            same_answer = unchanged(self.tracer.corrupting(value, skip=skip))
            if not same_answer:
                # A change may come from a write beside the work: is it the same without launches?
                return (
                    same_answer is False
                    and self.launches is not None
                    and unchanged(self.launches.nulled()) is True
                )
        # Nothing to replace in sight: what do the launches write?
        if self.launches is None or self.tracer.overwrote:
            return True
        return unchanged(self.launches.nulled()) is True


def _spoil(outputs: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    """Write over what differs from some elements of the last call's; return this one's. What is
    always the same may be a constant that the model holds.
    """
    few = list(map(few_of, outputs))
    with torch.inference_mode():  # which such outputs need, and others allow
        for x, now, then in zip(outputs, few, before, strict=False):  # none at first
            if not same(now, then):
                floats = x.is_floating_point() or x.is_complex()
                value = math.nan if floats else x.dtype == torch.bool or torch.iinfo(x.dtype).max
                _part(x).fill_(value)
    return few


def _part(x: Tensor) -> Tensor:
    """At random the whole or an eighth: a look at a few elements does not tell what was written."""
    if not x.is_contiguous() or not x.numel() or randbelow(2):
        return x
    start = randbelow(x.numel())
    return x.view(-1)[start : start + max(1, x.numel() // 8)]


def _over(old: Any, new: Any) -> Any:
    """New values, where possible in the old ones' memory."""
    leaves, form = flattened(new)
    held = leaves_of(old)
    if len(held) != len(leaves):
        return new
    return rebuilt(list(map(_written_over, held, leaves)), form)


def _written_over(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old.copy_(new) if (old.shape, old.dtype) == (new.shape, new.dtype) else new
    return new


def _copies(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().clone().contiguous() for leaf in leaves]
