"""A model and a stopwatch on one device, for every role that runs a model. Clock functions are
taken at import, before candidate code runs; native code can still forge times."""

from __future__ import annotations

import copy
import ctypes
import errno
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.utils._pytree import tree_leaves

from kernels_eval.config import HOARD_BYTES, HOARD_SHARE, KEPT_SAMPLES, MOST_FORMS, UNUSED
from kernels_eval.languages import Language
from kernels_eval.model.gradients import Passes, with_gradients
from kernels_eval.model.inputs import (
    Arguments,
    constructed,
    flatten_outputs,
    load_module,
    moved,
    plain_containers,
)
from kernels_eval.model.renewals import counterparts, renew
from kernels_eval.model.shared_memory import Memory, mapped, unpack, write
from kernels_eval.model.side_effects import copy_of, kept_state, with_side_effects
from kernels_eval.model.values import leaves_of, mapped_values
from kernels_eval.model.weights import (
    exchange_elements,
    frozen_of,
    randomise_weights,
    redraw_statistics,
    running_statistics,
    squeezed,
    transpose_weights,
)
from kernels_eval.protocol import (
    RENEWALS,
    RENEWED_BUFFERS,
    CallReport,
    Done,
    Gradients,
    KeptOutputs,
    MapMemory,
    ModelSpec,
    OutputForm,
    PackedValues,
    Prepare,
    RedrawWeights,
    Renew,
    ReportedOutput,
    RunUnseen,
    Sample,
    SampleReport,
    SharedMemory,
    ShowKept,
    SideEffects,
    UnseenReport,
    counted_ns,
    handles,
)
from kernels_eval.sandbox.channel import Channel

now_ns = time.perf_counter_ns
_process_ns, _thread_ns = time.process_time_ns, time.thread_time_ns
_drop = deque[Any](maxlen=0).append
_randbelow = secrets.randbelow
_synchronize = torch.cuda.synchronize
_Event = torch.cuda.Event

TIMED_COMMANDS = (Sample.command, RunUnseen.command)
"""Commands that leave memory cached: the next would otherwise allocate while timed."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_PERTURB = -1, -2, -4, -6


_mallopt = ctypes.CDLL(None).mallopt
"""Tunes glibc's allocator, which torch's Linux builds need."""


def poison_allocations(on: bool) -> None:
    """While on, malloc fills memory with UNUSED, so no value is right by luck."""
    _mallopt(M_PERTURB, 0xFF ^ UNUSED if on else 0)


def processor_ns() -> int:
    """Processor time of this process. Under a limit of it (RLIMIT_CPU) the kernel counts in ticks
    of milliseconds, until somebody asks for this thread's.
    """
    _thread_ns()
    return _process_ns()


HOST = SharedMemory(on_device=False)


@dataclass
class Hooks:
    """What a role does around the work of its runner."""

    count_calls: Callable[[], int] = lambda: 0
    """calls of custom kernels so far"""
    around_pass: Passes = lambda name: nullcontext()
    """spans the "forward" and the "backward" pass of each call"""
    after_construction: Callable[[], None] = lambda: None
    make_anew: Callable[[], Any] | None = None
    """makes a model that remembers its calls, as it is before the first; else it is copied"""


class ModelRunner:
    spec: ModelSpec
    module: ModuleType

    def __init__(
        self,
        channel: Channel,
        arguments: Callable[[ModelSpec], Arguments],
        hooks: Hooks | None = None,
    ) -> None:
        self.channel, self.arguments = channel, arguments
        self.hooks = hooks or Hooks()
        self.device = "cpu"
        self.model: Any = None
        self.timed_inputs: list[list[Any]] = []
        self.shared: dict[str, Memory] = {}
        """of rounds, by what it is for"""
        self.turn = 0
        self.held: deque[tuple[int, Any]] = deque(maxlen=KEPT_SAMPLES)
        """of samples: places of inputs, and the outputs"""
        self.flush: Tensor | None = None
        self._chosen = deque[Any](maxlen=1)
        self._hoard_bytes = 0
        self.gradients: Gradients | None = None
        self.effects: SideEffects | None = None
        self.redrawn: RedrawWeights | None = None
        self.earlier: list[list[Any]] = []
        """inputs of the calls that come before each in `forward`"""
        self.between: list[Any] = []
        """arguments of a call that comes between a forward pass and its backward pass"""
        self._begun: tuple[Any, Any] = None, None
        """of a model that remembers its calls, and the copy that they are made of"""
        self._made = 0.0

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
            # torch asks NVML how many devices there are, which told some confined processes 0
            torch.cuda._cached_device_count = max(1, torch._C._cuda_getDeviceCount())
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    @handles(Prepare)
    def prepare(self, request: Prepare) -> Done:
        self.prepare_device(request.device, request.threads)
        if self.on_gpu:
            self.warm_up()
            self.synchronise()
        if request.language:
            with suppress(Exception):  # what fails here fails in a candidate too, and is told there
                self.warm_up_compiler(request.language)
        return Done()

    def warm_up_compiler(self, language: Language) -> None:
        """Run this language's example: the first kernel of a process takes seconds more than the
        next.
        """
        path = Path("warm_up.py").absolute()
        path.write_text(language.example, encoding="utf-8")
        module = load_module(str(path), path.stem)
        x = torch.zeros(2, 64, device=self.device)
        module.ModelNew(64).to(self.device)(x, x)
        self.synchronise()

    def warm_up(self) -> None:
        x = torch.rand(64, 64, device=self.device) * 2 - 1
        y = torch.randn(64, 64, device=self.device).clone().copy_(x).fill_(0.5)
        torch.equal(x, y)
        bool(((x == y) | (x != x)).all())
        self.timed([])

    # -- the model ---------------------------------------------------------------------------------

    def construct(self, seed: int | None = None) -> Any:
        """A new model as its constructor left it, perhaps under another seed."""
        spec = self.spec if seed is None else self.spec.model_copy(update={"seed": seed})
        model = constructed(self.module, self.arguments(self.spec), spec)
        self.hooks.after_construction()
        return model

    def build(self, seed: int | None = None) -> Any:
        return moved(self.construct(seed), self.device)

    def trim_memory(self, command: str) -> None:
        """Give cached device memory back after each command: reference and candidate share a
        GPU.
        """
        if not self.on_gpu or command in TIMED_COMMANDS:
            return
        if not self._hoard_bytes:
            total = torch.cuda.get_device_properties(0).total_memory
            self._hoard_bytes = max(HOARD_BYTES, total // HOARD_SHARE)
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > self._hoard_bytes:
            torch.cuda.empty_cache()

    def synchronise(self) -> None:
        if self.on_gpu:
            _synchronize()

    def forward(self, inputs: list[Any]) -> Any:
        """One call, a first one unless there are `earlier` ones."""
        self.renew()
        self._made = math.inf  # perhaps in another shape: no sample goes on from here
        with torch.no_grad():
            return self.called()(*inputs)

    @property
    def running(self) -> Any:
        """What a call calls: the model, or a copy of one that remembers its calls."""
        return self._begun[1] if self.remembers else self.model

    @property
    def remembers(self) -> bool:
        return bool(self.effects and self.effects.remembers)

    def renew(self) -> None:
        """Make a model that remembers its calls anew, unless none was made."""
        if not self.remembers or (self._begun[0] is self.model and not self._made):
            return
        make = self.hooks.make_anew
        self._begun = self.model, make() if make else copy.deepcopy(self.model)
        self._made = 0

    @handles(Renew)
    def renew_for_round(self, _: Renew) -> Done:
        self.renew()
        self.synchronise()
        return Done()

    def advance(self, calls: int) -> None:
        """Count calls to come; first make the model anew where its reference takes fewer."""
        most = self.effects.calls if self.effects else calls
        if self._begun[0] is not self.model or self._made + calls > most:
            self.renew()
        self._made += calls

    def called(self, work: Callable[..., Any] | None = None, *, effects: bool = True) -> Any:
        """What one call calls: the model, with its backward pass where gradients are asked for, or
        other `work`; and what else the reference changes, unless it is timed alone.
        """
        asked, model, changed = self.gradients, self.running, self.effects

        def passes(*inputs: Any) -> Any:
            if asked is None:
                return None
            between = self.between if changed is None else ()
            return with_gradients(model, inputs, asked, self.hooks.around_pass, between)

        def last(*inputs: Any) -> Any:
            for each in self.earlier:
                one(*mapped_values(copy_of, each))
            return one(*inputs)

        one = work or (passes if asked else model)
        call = last if self.earlier else one
        if changed is None or not effects:
            return call
        return lambda *inputs: with_side_effects(call, model, inputs, changed)

    def unchanged(self, inputs: list[Any]) -> list[Any]:
        """Those that a call must leave as they are."""
        changed = self.effects.arguments if self.effects else ()
        return [x for index, x in enumerate(inputs) if index not in changed]

    def unused(self, inputs: list[Any]) -> list[Any]:
        """These, with copies of those that a call changes: none works on what another has left."""
        changed = self.effects.arguments if self.effects else ()
        return [
            mapped_values(copy_of, x) if index in changed else x for index, x in enumerate(inputs)
        ]

    def stamp(self, event: Any = None) -> Any:
        if not self.on_gpu:
            return now_ns()
        event = event or _Event(enable_timing=True)
        event.record()
        return event

    def passed_ns(self, begin: Any, end: Any) -> int:
        """Nanoseconds between two stamps; the device is done."""
        return int(begin.elapsed_time(end) * 1e6) if self.on_gpu else int(end - begin)

    @handles(RedrawWeights)
    def redraw_weights(self, request: RedrawWeights) -> Done:
        self.redrawn, self._begun = None, (None, None)
        if request.seed is None:
            self.model = self.build()
        else:
            self.redrawn = request
            self.redraw(self.model, request, request.seed)
            self.synchronise()
        return Done()

    def renew_weights(self, model: Any, form: str, seed: int) -> None:
        held = counterparts(model, self.spec.drawn).values()
        renew(model, self.build(seed), held if form == RENEWED_BUFFERS else None)

    def redraw(self, model: Any, request: RedrawWeights, seed: int) -> None:
        if request.form in RENEWALS:
            self.renew_weights(model, request.form, seed)
            return
        frozen = frozen_of(model) if request.frozen else {}
        names, form, padded = request.names, request.form, self.spec.padded
        randomise_weights(model, seed, names=names, but=frozen, form=form, padded=padded)
        if request.transposed:
            transpose_weights(model)
        if request.nearly:
            exchange_elements(model, seed)
        held = [*frozen.values(), *running_statistics(model, renamed=True, but=self.told)]
        wanted = [x for x in held if squeezed(x) in request.statistics]
        redraw_statistics(wanted, seed)

    @property
    def statistics(self) -> list[Tensor]:
        return running_statistics(self.model, but=self.told)

    @property
    def told(self) -> list[str]:
        """Buffers that are no weights, as calls fill them."""
        return [form.name for form in self.effects.buffers if form.told] if self.effects else []

    # -- shared memory -----------------------------------------------------------------------------

    def memory(self, shared: SharedMemory = HOST) -> Memory:
        """The memory of this message's descriptor. Raises OSError where it could not be opened."""
        if not self.channel.descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        descriptor = self.channel.descriptors.pop(0)
        return mapped(descriptor, on_device=shared.on_device, size=shared.size)

    @handles(MapMemory)
    def map_memory(self, request: MapMemory) -> Done:
        self.shared.pop(request.name, None)  # its memory first
        self.shared[request.name] = self.memory(request.memory)
        return Done()

    @handles(RunUnseen)
    def run_unseen(self, request: RunUnseen) -> UnseenReport:
        """Run unseen inputs, all under the judge's clock. The outputs should have one form."""
        given = request.inputs
        sets = unpack(given.packed, self.shared["inputs"], given.count, given.stride)
        model = self.called(making(request.empty, self.device) if request.empty else None)
        self._made += 0 if request.empty else given.count
        counted = self.hooks.count_calls()
        into, kept, layout = self.shared[request.into], list[list[Any]](), 0
        weights = storages(self.running)
        # by what tells their forms apart: describing hundreds takes longer than making them
        forms: dict[Any, tuple[Any, list[Any], str]] = {}
        with torch.no_grad():
            for index, values in enumerate(sets):
                output = model(*values)
                with DisableTorchFunction():  # a candidate's default device would slow this down
                    leaves, structure = flatten_outputs(output)
                    layout = max(layout, layout_of(leaves, [values, kept[-1:]], weights))
                    plain = all(type(x) is Tensor for x in leaves) and plain_containers(output)
                    form = structure, tuple((type(x), x.shape, x.dtype, x.device) for x in leaves)
                    forms.setdefault(form if plain else index, (output, leaves, structure))
                    if not request.at_once:  # as views: a caller may keep nothing else
                        kept.append([x.detach() for x in leaves] if plain else leaves)
                    elif plain:
                        write(into, [leaves], skipped=index)
            described_forms = [
                described(*form, layout=layout) for form in list(forms.values())[:MOST_FORMS]
            ]
            if kept and len(forms) == 1 and described_forms[0].plain:
                write(into, kept)
        self.synchronise()
        return UnseenReport(forms=described_forms, custom_calls=self.hooks.count_calls() - counted)

    def unpacked(self, inputs: PackedValues) -> list[Any]:
        return unpack(inputs.packed, self.memory(inputs), inputs.count, inputs.stride)

    # -- timing ------------------------------------------------------------------------------------

    @handles(Sample)
    def sample(self, request: Sample) -> SampleReport:
        count = len(self.timed_inputs)
        places = [(self.turn + i) % count for i in range(request.calls)]
        batch = [self.unused(self.timed_inputs[place]) for place in places]
        self.turn += request.calls
        self.advance(request.calls)
        counted, used = self.hooks.count_calls(), processor_ns()
        chosen = _randbelow(request.calls) if request.kept else None
        spent = self.timed(batch, copied=request.copied, chosen=chosen)
        used = processor_ns() - used
        if chosen is not None:
            self.held.append((places[chosen], self._chosen.pop()))
        return SampleReport(
            ns=counted_ns(spent, used, self.spec.threads) if request.by_processor else spent,
            custom_calls=self.hooks.count_calls() - counted,
        )

    @handles(ShowKept)
    def show_kept(self, request: ShowKept) -> KeptOutputs:
        places = [place for place, _ in self.held]
        outputs = [(output, *flatten_outputs(output)) for _, output in self.held]
        self.held.clear()
        forms = [described(*output, layout=0) for output in outputs]
        if forms and all(form.plain and form == forms[0] for form in forms):
            with torch.no_grad():
                write(self.shared[request.into], [leaves for _, leaves, _ in outputs])
        self.synchronise()
        return KeptOutputs(places=places, forms=forms)

    def timed(
        self,
        batch: list[list[Any]],
        *,
        cold: bool = True,
        copied: bool = False,
        chosen: int | None = None,
    ) -> int:
        """Nanoseconds of these calls, on a GPU by its own clock; `cold`: with an empty cache. Every
        output is dropped when its call returns, but the `chosen` one.
        """
        model = self.called(effects=False)
        model = _copying(model) if copied else model
        # both methods are alike: a call does not take longer where its output is held
        takes: list[Callable[[Any], None]] = [_drop] * len(batch)
        if chosen is not None:
            takes[chosen] = self._chosen.append
        calls = list(zip(batch, takes, strict=True))
        # made before: the making takes time
        begin, end = (_Event(enable_timing=True) if self.on_gpu else None for _ in range(2))
        if cold and self.on_gpu:
            if self.flush is None:
                size = 3 * torch.cuda.get_device_properties(0).L2_cache_size
                self.flush = torch.empty(size // 4, dtype=torch.int32, device=self.device)
            self.flush.zero_()
        with kept_state(self.running, self.effects), torch.no_grad():
            self.synchronise()
            started = self.stamp(begin)
            for inputs, take in calls:
                take(model(*inputs))
            ended = self.stamp(end)
            self.synchronise()
        return self.passed_ns(started, ended)


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def making(forms: Sequence[OutputForm], device: str) -> Callable[..., Any]:
    """A call without work: outputs of these forms, as they come, in memory that the system has
    given: pages of a CPU's that are kept in a round are new, as in no sample.
    """
    strides = [form.strides or torch.empty(form.shape, device="meta").stride() for form in forms]
    dtypes = [getattr(torch, form.dtype.removeprefix("torch.")) for form in forms]
    kinds = [(form.shape, *rest) for form, *rest in zip(forms, strides, dtypes, strict=True)]

    def make(*_: object) -> Any:
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in kinds
        ]
        for x in made if device == "cpu" else ():
            count = x.untyped_storage().nbytes() // x.itemsize
            x.as_strided((count,), (1,))[:: max(1, PAGE_BYTES // x.itemsize)].zero_()
        return made[0] if len(made) == 1 else made

    return make


def _copying(model: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> list[Tensor]:
        leaves = [x for x in tree_leaves(model(*inputs)) if type(x) is Tensor]
        return [x.clone(memory_format=torch.contiguous_format) for x in leaves]

    return call


def best_s(work: Callable[[], object], tries: int) -> float:
    def once() -> float:
        started = now_ns()
        work()
        return (now_ns() - started) / 1e9

    return min(once() for _ in range(tries))


def described(output: Any, leaves: list[Any], structure: str, *, layout: int) -> CallReport:
    plain = all(type(leaf) is Tensor for leaf in leaves) and plain_containers(output)
    return CallReport(
        kinds=[type(leaf).__name__ for leaf in leaves],
        devices=[leaf.device.type if isinstance(leaf, Tensor) else "" for leaf in leaves],
        plain=plain,
        layout=layout,
        tensors=all(isinstance(leaf, Tensor) for leaf in leaves),
        structure=structure,
        outputs=[
            ReportedOutput(shape=list(leaf.shape), dtype=str(leaf.dtype))
            for leaf in leaves
            if plain
        ],
    )


def layout_of(leaves: list[Any], others: Any, lent: Collection[int] = ()) -> int:
    """How outputs lie in memory: 0 for their own and in order, 1 for their own, and one more for
    each that has elements of another, of `others` (inputs, an earlier call's outputs) or of
    storages at `lent`, repeats some, or is computed when read.
    """
    tensors = [x for x in leaves if type(x) is Tensor and x.layout is torch.strided and x.numel()]
    held = {*lent, *storages(others)}
    own = {
        x.data_ptr()
        for x in tensors
        if x.untyped_storage().data_ptr() not in held
        and not (x.is_neg() or x.is_conj() or _repeats(x))
    }
    shared = len(tensors) - len(own)
    return 1 + shared if shared else int(not all(x.is_contiguous() for x in tensors))


def storages(values: Any) -> set[int]:
    """Where the tensors of these values, or a model's parameters and buffers, have their memory."""
    if isinstance(values, torch.nn.Module):
        values = [*values.parameters(), *values.buffers()]
    tensors = (x for x in leaves_of(values) if isinstance(x, Tensor))
    return {x.untyped_storage().data_ptr() for x in tensors if x.layout is torch.strided}


def _repeats(x: Tensor) -> bool:
    steps = zip(x.shape, x.stride(), strict=True)
    return sum((size - 1) * step for size, step in steps) + 1 < x.numel()
