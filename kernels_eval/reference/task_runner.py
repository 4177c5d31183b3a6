"""What the roles that run a task's own model have in common: its module, its inputs from a seed,
and handing these to a process that holds no code of the task. And the role that runs a task's
reference under torch.compile, a second baseline.

Guarantees of that one: dynamo, inductor and their caches are its process's alone (a private
scratch, an environment of its own), so nothing that a candidate does to torch reaches them; nothing
runs eagerly in silence: a reference of which no graph was compiled is an error, and so is one that
is compiled anew too often. Does not guarantee that the compiled reference is right: the parent has
that compared.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import SHARED_ALIGNMENT
from kernels_eval.model.inputs import (
    Arguments,
    constructor_arguments,
    flatten_outputs,
    load_module,
    make_inputs,
    precision_of,
)
from kernels_eval.model.model_runner import (
    ModelRunner,
    asked_gradients,
    best_s,
    described,
    now_ns,
)
from kernels_eval.model.shared_memory import DeviceMemory, Memory, pack, write
from kernels_eval.protocol import (
    DECLARED,
    AnswerCompiled,
    CallReport,
    Compile,
    CompileReport,
    Done,
    DrawArguments,
    DrawInputs,
    DrawnTimingInputs,
    DrawTimingInputs,
    HandedOver,
    InputPlan,
    LoadModel,
    ModelSpec,
    Sample,
    SampleReport,
    handles,
)
from kernels_eval.sandbox.channel import Channel

GRADIENT_SEED = 0x5DEECE66D
"""Tells the draws of outputs' gradients from those of arguments under the same seed."""


def device_memory(size: int) -> DeviceMemory | None:
    """Device memory for another process; None where the driver refuses, or where there is none."""
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


def peak_bandwidth(gpu: Any) -> float:
    """Bytes per second that device memory can move: by its clock and bus width on a GPU, by copying
    64 MB on a CPU."""
    if gpu:
        clock_khz: float = getattr(gpu, "memory_clock_rate", 0)
        return 2.0 * clock_khz * 1e3 * getattr(gpu, "memory_bus_width", 0) / 8
    block = torch.ones(8 << 20, dtype=torch.float64)
    target = torch.empty_like(block)
    return 2 * block.nbytes / best_s(lambda: target.copy_(block), 4)


class TaskRunner(ModelRunner):
    """Runs the task's own model."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.plan: InputPlan | None = None
        self._outputs: dict[str, list[Tensor]] = {}
        self.drawn: tuple[HandedOver, Memory] | None = None
        """The last inputs that were given away."""

    def load_model(self, path: str, spec: ModelSpec) -> None:
        """Construct the task's own model."""
        self.spec = spec
        self.prepare_device(self.spec.device, self.spec.threads)
        self.module = load_module(path, "task")
        self.spec = self.spec.model_copy(update={"precision": precision_of(self.module)})
        self.model = self.build()
        if getattr(self.module, "GRADIENTS", False):
            self.gradients = asked_gradients(self.model, self.inputs(self.spec.seed))
        self.synchronise()

    def arguments(self, spec: ModelSpec) -> Arguments:
        return constructor_arguments(self.module, spec)

    def inputs(self, seed: int, distribution: str = DECLARED, shape: str = DECLARED) -> list[Any]:
        """Arguments of one call, and gradients of its outputs where the task asks for its own."""
        drawn = make_inputs(self.module, seed, distribution, self.plan, self.device, shape)
        if self.gradients is None:
            return drawn
        drawn = [x.detach() if isinstance(x, Tensor) else x for x in drawn]
        return drawn + self._drawn_gradients(drawn, seed, shape)

    def _drawn_gradients(self, arguments: list[Any], seed: int, shape: str) -> list[Tensor]:
        """Normal values in the form of each floating output, which is looked up once a shape."""
        if shape not in self._outputs:
            with torch.no_grad():
                found, _ = flatten_outputs(copy.deepcopy(self.model)(*copy.deepcopy(arguments)))
            self._outputs[shape] = [torch.empty_like(x) for x in found if x.is_floating_point()]
        generator = torch.Generator(self.device).manual_seed(seed ^ GRADIENT_SEED)
        return [x.normal_(generator=generator).clone() for x in self._outputs[shape]]

    @handles(DrawTimingInputs)
    def draw_timing_inputs(self, request: DrawTimingInputs) -> DrawnTimingInputs:
        self.timed_inputs = []  # the earlier sets make room first
        begun = self.work_stamp()
        self.timed_inputs = [self.inputs(seed) for seed in request.seeds]
        return DrawnTimingInputs(seconds=self.work_s(begun))

    def work_stamp(self) -> Any:
        """Now, by the clock of `work_s`."""
        return self._stamp() if self.on_gpu else time.process_time_ns()

    def work_s(self, begun: Any) -> float:
        """Seconds of work since a `work_stamp`, for decisions that other processes' work must not
        sway: this process's processor time, shared by its threads, or on a GPU the device's clock,
        by which gaps between launches count too."""
        ended = self.work_stamp()
        self.synchronise()
        threads = 1 if self.on_gpu else self.spec.threads
        return self._passed_ns([(begun, ended)]) / 1e9 / threads

    # -- for other processes -----------------------------------------------------------------------

    @handles(DrawInputs)
    def draw_inputs(self, request: DrawInputs) -> HandedOver:
        pairs = zip(request.seeds, request.distributions, strict=True)
        drawn = (self.inputs(seed, name, request.shape) for seed, name in pairs)
        return self._handed_over(drawn, len(request.seeds), request)

    @handles(DrawArguments)
    def draw_arguments(self, request: DrawArguments) -> HandedOver:
        arguments = self.arguments(self.spec.under(request.seed))
        return self._handed_over([arguments], 1, request)

    def packed_bytes(self, value: object) -> int:
        """Bytes of shared memory that a value takes."""
        return pack(value, None, self.module).bytes

    def _handed_over(
        self, values: Iterable[Any], count: int, request: DrawInputs | DrawArguments
    ) -> HandedOver:
        """Put these values into new shared memory."""
        self.drawn = None  # its memory first
        memory = device_memory(request.size) if request.on_device else self.memory()
        if memory is None:
            return HandedOver(shared=False)
        stride = request.size // max(1, count) // SHARED_ALIGNMENT * SHARED_ALIGNMENT
        packed = [
            pack(value, memory, self.module, index * stride) for index, value in enumerate(values)
        ]
        used = max((each.bytes for each in packed), default=0)
        if used > stride:
            raise ValueError(f"the inputs take {used} bytes this time, and {stride} before")
        self.synchronise()
        texts = [each.text for each in packed]
        texts = texts[:1] if len(set(texts)) == 1 else texts
        answer = HandedOver(shared=True, packed=texts, count=count, stride=stride)
        self.drawn = answer, memory
        if isinstance(memory, DeviceMemory):
            self.channel.attached.append(memory.descriptor)
        return answer


FIRST_CALLS_S = 0.3
FEWEST_FIRST_CALLS = 3  # CUDA graphs run a shape once as it is and record it with the second call

INDUCTOR = {
    "compile_threads": 1,  # here and now: a pool of processes would go on beside what is timed
    "cpp_cache_precompile_headers": False,  # such a header is larger than a file of a child may be
    "fx_graph_remote_cache": False,
    "autotune_remote_cache": False,
}
DYNAMO = {
    "suppress_errors": False,
    "fail_on_recompile_limit_hit": True,
}  # either way it would go on eagerly and not say so


class NothingCompiled(RuntimeError):
    """torch.compile went through the reference and left all of it to Python."""


class CompiledRole(TaskRunner):
    """Serves one task: loads and compiles it, answers, and is then timed."""

    @handles(LoadModel)
    def load(self, request: LoadModel) -> Done:
        self.load_model(request.path, request.spec)
        return Done()

    @handles(Compile)
    def compile(self, request: Compile) -> CompileReport:
        """Raises what the compiler raises, and NothingCompiled."""
        import torch._dynamo.config
        import torch._inductor.config

        _set(torch._dynamo.config, DYNAMO)
        _set(torch._inductor.config, INDUCTOR)
        self.model = torch.compile(
            self.model, mode=None if request.mode == "default" else request.mode
        )
        self.forward(self.inputs(request.seed))
        self.synchronise()
        if not self.graphs:
            raise NothingCompiled("torch.compile found no graph in it: all of it runs in Python")
        return CompileReport(graphs=self.graphs)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far in this process, those of every new compilation included."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    @handles(AnswerCompiled)
    def answer(self, request: AnswerCompiled) -> CallReport:
        output = self.forward(self.inputs(request.seed))
        leaves, structure = flatten_outputs(output)
        # CUDA graphs write over an output with the next call
        write(self.memory(), [[leaf.detach().clone() for leaf in leaves]])
        self.synchronise()
        return described(output, leaves, structure)

    @handles(DrawTimingInputs)
    def draw_timing_inputs(self, request: DrawTimingInputs) -> DrawnTimingInputs:
        """As the other roles, and then one call on each set outside the clock, as long as these
        take little: what is compiled anew for one of them, or recorded with the second call, is
        compiled here."""
        answer, started = super().draw_timing_inputs(request), now_ns()
        for number, inputs in enumerate(self.timed_inputs):
            if number >= FEWEST_FIRST_CALLS and now_ns() - started > FIRST_CALLS_S * 1e9:
                break
            self.forward(inputs)
        self.synchronise()
        return answer.model_copy(update={"graphs": self.graphs})

    @handles(Sample)
    def sample(self, request: Sample) -> SampleReport:
        return super().sample(request).model_copy(update={"graphs": self.graphs})


def _set(config: object, values: Mapping[str, object]) -> None:
    """Settings of torch's compilers, those that this torch knows."""
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
