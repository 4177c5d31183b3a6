"""A task's own model: its module, its inputs from a seed, and handing these to a process without
the task's code.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import REPEATABLE_RTOL, SHARED_ALIGNMENT
from kernels_eval.model.gradients import asked_gradients
from kernels_eval.model.inputs import (
    Arguments,
    constructor_arguments,
    flatten_outputs,
    load_module,
    make_inputs,
    precision_of,
)
from kernels_eval.model.measurement import close, same
from kernels_eval.model.model_runner import ModelRunner, best_s
from kernels_eval.model.shared_memory import DeviceMemory, Memory, pack
from kernels_eval.model.values import Form, leaves_of, rebuilt
from kernels_eval.model.weights import padded_shapes, weights_of
from kernels_eval.protocol import (
    DECLARED,
    NEAR,
    DrawInputs,
    DrawnTimingInputs,
    DrawTimingInputs,
    Expect,
    HandedOver,
    HandOver,
    InputPlan,
    ModelSpec,
    handles,
)
from kernels_eval.reference.operands import Operands
from kernels_eval.sandbox.channel import Channel

REFUSALS = (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, AssertionError)
"""What a task raises for inputs or modes that it does not take."""
GRADIENT_SEED = 0x5DEECE66D
"""Separates the draws of outputs' gradients from those of arguments under one seed."""


def device_memory(size: int) -> DeviceMemory | None:
    """Device memory for another process; None where the driver refuses, or there is no GPU."""
    for _ in range(2):
        with suppress(OSError, AttributeError, RuntimeError):
            return DeviceMemory(size)
        torch.cuda.empty_cache()  # what is kept for later may be what is missing
    return None


def require_tensors(leaves: list[Any]) -> None:
    """Raise TypeError unless a task's outputs are tensors, and there are any."""
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = [type(leaf).__name__ for leaf in leaves] or "nothing"
        raise TypeError(f"the reference returns {kinds}, not tensors")
    require_plain("the reference returns", leaves)


def require_plain(what: str, leaves: Iterable[Any]) -> None:
    """Raise TypeError for a tensor that is no array of elements in memory."""
    for x in leaves:
        if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested or x.is_quantized):
            kind = "nested" if x.is_nested else "quantised" if x.is_quantized else x.layout
            raise TypeError(
                f"{what} a {kind} tensor, and only plain (strided) ones are supported: give its"
                " parts, such as indices and values, as tensors of their own"
            )


def _nearly_same(one: Any, other: Any) -> bool:
    """Whether tensors are but for the order of a GPU's sums."""
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and close(one, other, REPEATABLE_RTOL)


def require_repeatable(inputs: list[Any], again: list[Any]) -> None:
    """Raise ValueError where one seed does not give one call's arguments: they are drawn for the
    expected answer, and again for the candidate."""
    leaves = leaves_of(inputs), leaves_of(again)
    if not all(same(x, y) or _nearly_same(x, y) for x, y in zip(*leaves, strict=True)):
        raise ValueError(
            "get_inputs() gives other values under the same seed: draw from torch's, NumPy's or"
            " Python's own generator (torch.randn, np.random.randn, random.random), or seed yours"
        )


def peak_bandwidth(gpu: Any) -> float:
    """Bytes per second of device memory: by clock and bus width, or copying 64 MB on a CPU."""
    if gpu:
        clock_khz: float = getattr(gpu, "memory_clock_rate", 0)
        return 2.0 * clock_khz * 1e3 * getattr(gpu, "memory_bus_width", 0) / 8
    block = torch.ones(8 << 20, dtype=torch.float64)
    target = torch.empty_like(block)
    return 2 * block.nbytes / best_s(lambda: target.copy_(block), 4)


class TaskModel:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.runner = ModelRunner(channel, self.arguments)
        self.left_out: list[str] = []
        self.plan: InputPlan | None = None
        self.settings: dict[str, tuple[list[Any], Form]] = {}
        """Other arguments of the constructor, by the name of their trial."""
        self.setting = ""
        """The name of those that it is given now."""
        self._outputs: dict[str, list[Tensor]] = {}
        self._operands: list[Tensor] | None = None
        self.kept: tuple[tuple[int, str, str] | None, list[Any]] = None, []
        """Inputs that will be given away, and what they were drawn by."""
        self.drawn: tuple[HandedOver, Memory] | None = None
        """The last inputs that were given away."""

    def load(self, path: str, spec: ModelSpec) -> None:
        runner = self.runner
        runner.prepare_device(spec.device, spec.threads)
        runner.module = load_module(path, "task")
        runner.spec = spec.model_copy(update={"precision": precision_of(runner.module)})
        runner.model, runner.effects = runner.build(), spec.effects
        runner.spec = runner.spec.model_copy(update={"padded": padded_shapes(runner.model)})
        if getattr(runner.module, "GRADIENTS", False):
            runner.gradients = asked_gradients(runner.model, self.inputs(spec.seed))
        runner.synchronise()

    def require(self, name: str) -> None:
        """Raise ValueError, as a task does for what it does not take, where this is left out."""
        if name in self.left_out:
            raise ValueError(f"left out: {name}")

    def arguments(self, spec: ModelSpec) -> Arguments:
        if not self.setting:
            return constructor_arguments(self.runner.module, spec)
        leaves, form = self.settings[self.setting]
        args, kwargs = rebuilt([copy.deepcopy(x) for x in leaves], form)
        return args, kwargs

    @contextmanager
    def under(self, setting: str) -> Iterator[None]:
        """For the block, models are constructed with other arguments, of this name."""
        self.setting = setting
        try:
            yield
        finally:
            self.setting = ""

    def inputs(self, seed: int, distribution: str = DECLARED, shape: str = DECLARED) -> list[Any]:
        """Arguments of one call, and gradients of its outputs where the task asks for its own."""
        runner, operands = self.runner, self._operands_of(distribution)
        plan, device = self.plan, runner.device
        drawn = make_inputs(runner.module, seed, distribution, plan, device, shape, operands)
        if runner.gradients is None:
            return drawn
        drawn = [x.detach() if isinstance(x, Tensor) else x for x in drawn]
        return drawn + self._drawn_gradients(drawn, seed, shape)

    def _operands_of(self, distribution: str) -> list[Tensor]:
        """What the declared call computes with, where inputs are to be like that."""
        if NEAR not in distribution:
            return []
        if self._operands is None:
            inputs = self.inputs(self.runner.spec.seed)
            with Operands(inputs) as operands:
                self.outputs(inputs)
            self._operands = operands.found
        return self._operands

    def inputs_of(self, trial: Expect) -> list[Any]:
        return self.inputs(trial.seed, trial.distribution, trial.shape)

    def inputs_once_more(self, seed: int, distribution: str, shape: str) -> list[Any]:
        """Those that were kept, if these are asked for."""
        (kept, inputs), self.kept = self.kept, (None, [])
        return (
            inputs
            if kept == (seed, distribution, shape)
            else self.inputs(seed, distribution, shape)
        )

    def outputs(self, inputs: list[Any]) -> list[Tensor]:
        return flatten_outputs(self.runner.forward(inputs))[0]

    def _drawn_gradients(self, arguments: list[Any], seed: int, shape: str) -> list[Tensor]:
        if shape not in self._outputs:
            with torch.no_grad():
                model = copy.deepcopy(self.runner.model)
                found, _ = flatten_outputs(model(*copy.deepcopy(arguments)))
            self._outputs[shape] = [torch.empty_like(x) for x in found if x.is_floating_point()]
        generator = torch.Generator(self.runner.device).manual_seed(seed ^ GRADIENT_SEED)
        return [x.normal_(generator=generator).clone() for x in self._outputs[shape]]

    @handles(DrawTimingInputs)
    def draw_timing_inputs(self, request: DrawTimingInputs) -> DrawnTimingInputs:
        self.runner.timed_inputs = []  # the earlier sets make room first
        started = self.work_stamp()
        self.runner.timed_inputs = [
            self.inputs(seed, request.distribution) for seed in request.seeds
        ]
        return DrawnTimingInputs(seconds=self.work_s(started))

    def work_stamp(self) -> Any:
        """Now, by the clock of `work_s`."""
        return self.runner.stamp() if self.runner.on_gpu else time.process_time_ns()

    def work_s(self, started: Any) -> float:
        """Seconds of work since a `work_stamp` that other processes do not sway: processor time
        over threads, or a GPU's clock with gaps between launches.
        """
        ended, runner = self.work_stamp(), self.runner
        runner.synchronise()
        threads = 1 if runner.on_gpu else runner.spec.threads
        return runner.passed_ns(started, ended) / 1e9 / threads

    # -- for other processes -----------------------------------------------------------------------

    @handles(DrawInputs)
    def draw_inputs(self, request: DrawInputs) -> HandedOver:
        pairs = zip(request.seeds, request.distributions, strict=True)
        drawn = (self.inputs_once_more(seed, name, request.shape) for seed, name in pairs)
        return self._handed_over(drawn, len(request.seeds), request)

    @handles(HandOver)
    def hand_over(self, request: HandOver) -> HandedOver:
        runner = self.runner
        with self.under(request.settings):
            held = weights_of(runner.model) if request.weights else self.arguments(runner.spec)
        return self._handed_over([held], 1, request)

    def packed_bytes(self, value: object) -> int:
        return pack(value, None, self.runner.module).bytes

    def _handed_over(
        self, values: Iterable[Any], count: int, request: DrawInputs | HandOver
    ) -> HandedOver:
        self.drawn = None  # its memory first
        of_round = isinstance(request, DrawInputs) and request.of_round
        if of_round:
            memory: Memory | None = self.runner.shared["inputs"]
        else:
            memory = device_memory(request.size) if request.on_device else self.runner.memory()
        if memory is None:
            return HandedOver(shared=False)
        stride = request.size // max(1, count) // SHARED_ALIGNMENT * SHARED_ALIGNMENT
        module = self.runner.module
        packed = [pack(value, memory, module, index * stride) for index, value in enumerate(values)]
        used = max((each.bytes for each in packed), default=0)
        if used > stride:
            raise ValueError(f"the inputs take {used} bytes this time, and {stride} before")
        self.runner.synchronise()
        texts = [each.text for each in packed]
        texts = texts[:1] if len(set(texts)) == 1 else texts
        answer = HandedOver(shared=True, packed=texts, count=count, stride=stride)
        self.drawn = answer, memory
        if isinstance(memory, DeviceMemory) and not of_round:
            self.channel.attached.append(memory.descriptor)
        return answer
