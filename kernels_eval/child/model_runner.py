"""What the reference and the candidate process have in common: a model, its inputs, and a stopwatch
on one device.

The functions of the clock are taken when this module is imported, before any candidate code runs:
patching `time` or `torch.cuda` later does not reach them. Native code does; the parent's clock
bounds what is reported here.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch

from kernels_eval.checks.inputs import make_inputs, randomise_weights
from kernels_eval.isolation.channel import Channel

_now_ns = time.perf_counter_ns
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


class Side:
    """A model, its inputs, and a stopwatch on one device."""

    def __init__(self, channel: Channel, exchange: int) -> None:
        self.channel, self.exchange = channel, exchange
        self.device = "cpu"
        self.model: Any = None
        self.task: Any = None
        self.plan: dict[str, Any] | None = None
        self.timed_inputs: list[list[Any]] = []
        self.turn = 0
        self.flush: Any = None
        self._hoard_bytes = 0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def prepare_device(self, device: str, threads: int) -> None:
        self.device = device
        torch.set_num_threads(threads)
        # Memory that was freed stays mapped: without this every output of some megabytes costs page
        # faults, on either side.
        _mallopt(M_MMAP_MAX, 0)
        _mallopt(M_TRIM_THRESHOLD, 1 << 30)
        _mallopt(M_TOP_PAD, 16 << 20)
        if self.on_gpu:
            torch.cuda.init()
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False

    def do_prepare(self, device: str, threads: int) -> dict[str, Any]:
        """Make the device ready before the work is known: its context, and the kernels that every
        verification needs."""
        self.prepare_device(device, threads)
        if self.on_gpu:
            self.warm_up()
            self.synchronise()
        self.channel.accepts_descriptors = True  # `do_exchange` is next
        return {}

    def warm_up(self) -> None:
        """Run once what CUDA would load with its first use."""
        x = torch.rand(64, 64, device=self.device) * 2 - 1
        y = torch.randn(64, 64, device=self.device).clone().copy_(x).fill_(0.5)
        torch.equal(x, y)
        bool(((x == y) | (x != x)).all())
        self._sample_gpu([])

    def do_exchange(self) -> dict[str, Any]:
        """Take over what outputs are returned through: it comes with this message."""
        self.channel.accepts_descriptors = False
        os.close(self.exchange)
        self.exchange = self.channel.descriptors.pop()
        return {}

    def give_back_memory(self) -> None:
        """Return cached device memory to the driver: reference and candidate share one GPU, and
        neither sees the other's cache."""
        if not self.on_gpu:
            return
        if not self._hoard_bytes:
            self._hoard_bytes = max(
                HOARD_BYTES, torch.cuda.get_device_properties(0).total_memory // HOARD_SHARE
            )
        if torch.cuda.memory_reserved() > self._hoard_bytes:
            torch.cuda.empty_cache()

    def synchronise(self) -> None:
        if self.on_gpu:
            _synchronize()

    def forward(self, inputs: list[Any]) -> Any:
        with torch.no_grad():
            return self.model(*inputs)

    def inputs(self, seed: int, distribution: str, shape: str = "declared") -> list[Any]:
        return make_inputs(self.task, seed, distribution, self.plan, self.device, shape)

    def do_weights(self, seed: int) -> dict[str, Any]:
        randomise_weights(self.model, seed)
        self.synchronise()
        return {}

    def do_timing_inputs(self, seeds: list[int]) -> dict[str, Any]:
        """Draw one set of inputs per seed; samples rotate over them. Returns the seconds that it
        took."""
        self.timed_inputs = []  # the earlier sets make room first
        started = _now_ns()
        self.timed_inputs = [self.inputs(seed, "declared") for seed in seeds]
        self.synchronise()
        self.give_back_memory()
        return {"seconds": (_now_ns() - started) / 1e9}

    def do_sample(self, calls: int) -> dict[str, Any]:
        """Time `calls` forward calls as one sample, each on the next of the prepared inputs.
        Returns elapsed nanoseconds."""
        count = len(self.timed_inputs)
        batch = [self.timed_inputs[(self.turn + i) % count] for i in range(calls)]
        self.turn += calls
        return {"ns": self._sample_gpu(batch) if self.on_gpu else self._sample_cpu(batch)}

    def _sample_cpu(self, batch: list[list[Any]]) -> int:
        model = self.model
        with torch.no_grad():
            started = _now_ns()
            for inputs in batch:
                model(*inputs)
            return _now_ns() - started

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


def same(a: Any, b: Any) -> bool:
    """Bit for bit the same value; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (
            a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
        ):  # outputs can be gigabytes: the usual case first
            return True
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and bool(((a == b) | ((a != a) & (b != b))).all())
        )
    return type(a) is type(b) and (not isinstance(a, int | float | str | bool) or a == b)


def close(a: torch.Tensor, b: torch.Tensor, rtol: float) -> bool:
    """|a - b| <= rtol (|b| + RMS(b)) everywhere, with NaN and infinities in the same places; no
    absolute tolerance, so tiny values count.

    Chunk by chunk: outputs can be gigabytes.
    """
    from kernels_eval.checks.correctness import CHUNK, DEVICE_CHUNK, all_finite

    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    step = DEVICE_CHUNK if a.is_cuda else CHUNK
    pairs = list(zip(a.reshape(-1).split(step), b.reshape(-1).split(step), strict=True))
    if not a.is_complex() and all_finite(a) and all_finite(b):
        scale = (sum(y.double().square().sum() for _, y in pairs) / max(b.numel(), 1)) ** 0.5
        wide = torch.promote_types(a.dtype, torch.float32)
        return all(
            bool(((x.to(wide) - y).abs() <= rtol * (y.abs().to(wide) + scale)).all())
            for x, y in pairs
        )
    energy, count = 0.0, 0
    for _, part in pairs:
        finite = part[torch.isfinite(part)].abs().double()
        energy, count = energy + float(finite.square().sum()), count + finite.numel()
    scale = (energy / count) ** 0.5 if count else 0.0
    for x, y in pairs:
        usual = torch.isfinite(x) & torch.isfinite(y)
        if not bool((usual | (x == y) | (torch.isnan(x) & torch.isnan(y))).all()):
            return False
        x, y = x[usual], y[usual]
        if not bool(((x - y).abs() <= rtol * (y.abs() + scale)).all()):
            return False
    return True
