"""What every role that runs a model has in common: the model, its inputs, and a stopwatch on one
device. The roles of `kernels_eval.reference` build on it too, in processes of their own.

The functions of the clock are taken when this module is imported, before any candidate code runs:
patching `time` or `torch.cuda` later does not reach them. Native code does; the parent's clock
bounds what is reported here.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from kernels_eval.checks.inputs import (
    construct,
    load_module,
    make_inputs,
    moved,
    randomise_weights,
)
from kernels_eval.checks.trials import DECLARED, InputPlan, ModelSpec
from kernels_eval.isolation.channel import Channel, Message

now_ns = time.perf_counter_ns
_synchronize = torch.cuda.synchronize
_Event = torch.cuda.Event

HOARD_BYTES = 1 << 30
# of a large device's memory one in so many parts: asking the driver again for each call takes
# longer than the call
HOARD_SHARE = 32
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_PERTURB = -1, -2, -4, -6


def _mallopt(option: int, value: int) -> None:
    """Tune glibc's allocator; other C libraries do without."""
    try:
        ctypes.CDLL(None).mallopt(option, value)
    except (AttributeError, OSError):
        return


def poison_allocations(on: bool) -> None:
    """While on, memory that malloc hands out is filled with 0xFE (-1.7e38 as fp32): nothing right
    is found in it by luck."""
    _mallopt(M_PERTURB, 1 if on else 0)


class ModelRunner:
    """A model, its inputs, and a stopwatch on one device."""

    def __init__(self, channel: Channel, output_buffer: int) -> None:
        """`output_buffer` is the descriptor of the memory that outputs are returned through."""
        self.channel, self.output_buffer = channel, output_buffer
        self.device = "cpu"
        self.model: Any = None
        self.task: Any = None
        self.plan: InputPlan | None = None
        self.timed_inputs: list[list[Any]] = []
        self.turn = 0
        self.flush: torch.Tensor | None = None
        self._hoard_bytes = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def prepare_device(self, device: str, threads: int) -> None:
        self.device = device
        torch.set_num_threads(threads)
        # Memory that was freed stays mapped: without this every output of some megabytes costs page
        # faults, in either process.
        _mallopt(M_MMAP_MAX, 0)
        _mallopt(M_TRIM_THRESHOLD, 1 << 30)
        _mallopt(M_TOP_PAD, 16 << 20)
        if self.on_gpu:
            torch.cuda.init()
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def do_prepare(self, device: str, threads: int) -> None:
        """Make the device ready before the work is known: its context, and the kernels that every
        verification needs."""
        self.prepare_device(device, threads)
        if self.on_gpu:
            self.warm_up()
            self.synchronise()
        self.channel.accepts_descriptors = True  # `do_output_buffer` is next

    def warm_up(self) -> None:
        """Run once what CUDA would load with its first use."""
        x = torch.rand(64, 64, device=self.device) * 2 - 1
        y = torch.randn(64, 64, device=self.device).clone().copy_(x).fill_(0.5)
        torch.equal(x, y)
        bool(((x == y) | (x != x)).all())
        self._sample_gpu([])

    def do_output_buffer(self) -> None:
        """Take over the output buffer that comes with this message."""
        self.channel.accepts_descriptors = False
        os.close(self.output_buffer)
        self.output_buffer = self.channel.descriptors.pop()

    # -- the model ---------------------------------------------------------------------------------

    def do_load(self, path: str, spec: Message) -> Any:
        """Construct the task's own model."""
        self.spec = ModelSpec.model_validate(spec)
        self.prepare_device(self.spec.device, self.spec.threads)
        self.task = self.module = load_module(path, "task")
        self.model = self.build()
        self.synchronise()

    def construct(self, seed: int | None = None) -> Any:
        """A new model as its constructor left it; without a seed, with the weights of the first."""
        spec, seed = self.spec, self.spec.seed if seed is None else seed
        return construct(
            self.module, spec.entry_point, self.task, spec.init_form, seed, spec.construct_on
        )

    def build(self, seed: int | None = None) -> Any:
        """The same, moved to the device."""
        return moved(self.construct(seed), self.device)

    def give_back_memory(self) -> None:
        """Return cached device memory to the driver: reference and candidate share one GPU, and
        neither sees the other's cache."""
        if not self.on_gpu:
            return
        if not self._hoard_bytes:
            total = torch.cuda.get_device_properties(0).total_memory
            self._hoard_bytes = max(HOARD_BYTES, total // HOARD_SHARE)
        if torch.cuda.memory_reserved() > self._hoard_bytes:
            torch.cuda.empty_cache()

    def synchronise(self) -> None:
        if self.on_gpu:
            _synchronize()

    def forward(self, inputs: list[Any]) -> Any:
        with torch.no_grad():
            return self.model(*inputs)

    def inputs(self, seed: int, distribution: str = DECLARED, shape: str = DECLARED) -> list[Any]:
        return make_inputs(self.task, seed, distribution, self.plan, self.device, shape)

    def do_weights(self, seed: int, names: Sequence[str] = ()) -> None:
        randomise_weights(self.model, seed, names=names)
        self.synchronise()

    # -- timing ------------------------------------------------------------------------------------

    def do_timing_inputs(self, seeds: list[int]) -> Message:
        """Draw one set of inputs per seed; samples rotate over them. Returns the seconds that it
        took."""
        self.timed_inputs = []  # the earlier sets make room first
        started = now_ns()
        self.timed_inputs = [self.inputs(seed) for seed in seeds]
        self.synchronise()
        self.give_back_memory()
        return {"seconds": (now_ns() - started) / 1e9}

    def do_sample(self, calls: int) -> Message:
        """Time `calls` forward calls as one sample, each on the next of the prepared inputs.
        Returns elapsed nanoseconds."""
        count = len(self.timed_inputs)
        batch = [self.timed_inputs[(self.turn + i) % count] for i in range(calls)]
        self.turn += calls
        return {"ns": self._sample_gpu(batch) if self.on_gpu else self._sample_cpu(batch)}

    def _sample_cpu(self, batch: list[list[Any]]) -> int:
        model = self.model
        with torch.no_grad():
            started = now_ns()
            for inputs in batch:
                model(*inputs)
            return now_ns() - started

    def _sample_gpu(self, batch: list[list[Any]]) -> int:
        model = self.model
        if self.flush is None:
            size = 3 * torch.cuda.get_device_properties(0).L2_cache_size
            self.flush = torch.empty(size // 4, dtype=torch.int32, device=self.device)
        begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
        with torch.no_grad():
            self.flush.zero_()
            _synchronize()
            begin.record()
            for inputs in batch:
                model(*inputs)
            end.record()
            _synchronize()
        return int(begin.elapsed_time(end) * 1e6)
