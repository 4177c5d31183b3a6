"""The only module that runs beside candidate code: serves commands in a forked process, one role each.

`capture` reads build requests out of a candidate's module; `reference` is the trusted side that holds expected values; `candidate` runs
the kernel. What the candidate role says of itself (call counts, flags) is testimony; outputs are bytes that the reference role compares,
and times are bounded by the parent's clock.
"""

from __future__ import annotations

import mmap
import time
import traceback
from collections import Counter
from types import ModuleType
from typing import Any

from kernels_eval.build.interception import intercept
from kernels_eval.checks.operators import compute_operators, reference_operators
from kernels_eval.isolation.channel import Channel, ChannelClosed

ORACLE_MAX_S = 5.0  # a float64 oracle slower than this is computed once and then done without


def serve(role: str, channel: Channel, exchange: int) -> None:
    session = {"capture": Capture, "reference": Reference, "candidate": CandidateSide}[role](channel, exchange)
    while True:
        try:
            message = channel.receive(None)
        except ChannelClosed:
            return
        handler = getattr(session, f"do_{message.pop('command')}")
        try:
            answer = handler(**message)
        except Exception as error:
            answer = {
                "error": _classify(error),
                "detail": f"{type(error).__name__}: {error}"[:2000],
                "trace": traceback.format_exc()[-4000:],
            }
        channel.send(answer)


def _classify(error: Exception) -> str:
    """The verdict reason that an exception stands for."""
    name, text = type(error).__name__, str(error)
    # torch's allocator asks NVML for details when memory runs out; where the sandbox keeps NVML away, that assertion is what is left
    nvml = "nvmlInit" in text and "CUDACachingAllocator" in text
    if isinstance(error, MemoryError) or "OutOfMemory" in name or "out of memory" in text or nvml:
        return "out_of_memory"
    if "CUDA error" in text or "AcceleratorError" in name or "illegal memory access" in text:
        return "cuda_error"
    if isinstance(error, ImportError) and "undefined symbol" in text:
        return "undefined_symbol"
    if isinstance(error, ModuleNotFoundError):
        return "no_module"
    if isinstance(error, SyntaxError):
        return "syntax_error"
    if isinstance(error, BuildFailed):
        return error.reason
    return "exception"


class BuildFailed(RuntimeError):
    """A build that the parent was asked for did not succeed; candidates may catch it like the RuntimeError torch raises."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(f"Error building extension: {log}")
        self.reason = reason


class Capture:
    """Runs the candidate's module with builds replaced by stubs, and reports what it asked to build."""

    def __init__(self, channel: Channel, exchange: int) -> None:
        self.specs: list[dict[str, Any]] = []

    def do_capture(self, path: str) -> dict[str, Any]:
        from kernels_eval.checks.inputs import load_module

        intercept(self._record)
        try:
            load_module(path, "candidate")
        except Exception as error:  # a module that needs its extension at import still told what to build
            return {"specs": self.specs, "error": _classify(error), "detail": f"{type(error).__name__}: {error}"[:2000]}
        return {"specs": self.specs}

    def _record(self, spec: dict[str, Any]) -> ModuleType:
        self.specs.append(spec)
        return _Stub(spec["name"])


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{name} is not built yet")

        return unavailable


# -- what both running roles share ------------------------------------------------------------------------------------------------


class Side:
    """A model, its inputs, and a stopwatch on one device."""

    def __init__(self, channel: Channel, exchange: int) -> None:
        self.channel, self.exchange = channel, exchange
        self.device = "cpu"
        self.model: Any = None
        self.task: Any = None
        self.plan: list[dict[str, Any]] | None = None
        self.timed_inputs: list[list[Any]] = []
        self.turn = 0

    def prepare_device(self, device: str, threads: int) -> None:
        import torch

        self.device = device
        torch.set_num_threads(threads)
        if device.startswith("cuda"):
            torch.cuda.init()
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False

    def synchronise(self) -> None:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()

    def forward(self, inputs: list[Any]) -> Any:
        import torch

        with torch.no_grad():
            return self.model(*inputs)

    def inputs(self, seed: int, distribution: str) -> list[Any]:
        from kernels_eval.checks.inputs import make_inputs

        return make_inputs(self.task, seed, distribution, self.plan, self.device)

    def do_weights(self, seed: int) -> dict[str, Any]:
        from kernels_eval.checks.inputs import randomise_weights

        randomise_weights(self.model, seed)
        self.synchronise()
        return {}

    def do_timing_inputs(self, seeds: list[int]) -> dict[str, Any]:
        self.timed_inputs = [self.inputs(seed, "declared") for seed in seeds]
        self.synchronise()
        return {}

    def do_sample(self, calls: int) -> dict[str, Any]:
        """Time `calls` forward calls as one sample, rotating over the prepared inputs. Returns elapsed nanoseconds."""
        self.turn += 1
        inputs = self.timed_inputs[self.turn % len(self.timed_inputs)]
        return {"ns": self._sample_cuda(inputs, calls) if self.device.startswith("cuda") else self._sample_cpu(inputs, calls)}

    def _sample_cpu(self, inputs: list[Any], calls: int) -> int:
        import torch

        with torch.no_grad():
            started = time.perf_counter_ns()
            for _ in range(calls):
                self.model(*inputs)
            return time.perf_counter_ns() - started

    def _sample_cuda(self, inputs: list[Any], calls: int) -> int:
        import torch

        if not hasattr(self, "flush"):
            size = 3 * torch.cuda.get_device_properties(0).L2_cache_size
            self.flush = torch.empty(size // 4, dtype=torch.int32, device=self.device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.no_grad():
            self.flush.zero_()
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                self.model(*inputs)
            end.record()
            torch.cuda.synchronize()
        return int(begin.elapsed_time(end) * 1e6)


class Reference(Side):
    """The trusted side: runs the task's own model, holds expected values, compares what a candidate returned."""

    def do_load(
        self, path: str, entry_point: str, init_form: str, device: str, threads: int, seed: int, oracle_max_bytes: int
    ) -> dict[str, Any]:
        import copy

        from kernels_eval.checks.inputs import construct, flatten_outputs, load_module, parameter_shapes, plan_inputs

        self.prepare_device(device, threads)
        self.task = load_module(path, "task")
        self.build = lambda: construct(self.task, entry_point, self.task, init_form, seed, device)
        self.model = self.build()
        inputs = self.inputs(seed, "declared")
        self.plan = plan_inputs(inputs)
        before = [copy.deepcopy(x) for x in inputs]
        leaves, self.structure = flatten_outputs(self.forward(inputs))
        self.mutates = any(not _same(a, b) for a, b in zip(before, inputs, strict=True))
        self.expected: dict[str, dict[str, Any]] = {}
        self.oracle_max_bytes = oracle_max_bytes
        import torch

        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TypeError(f"the reference returns {[type(leaf).__name__ for leaf in leaves]}, not tensors")
        again = self.inputs(seed, "declared")
        operators = reference_operators(lambda: self.forward(again))
        self.model = self.build()
        self.synchronise()
        floats = [leaf.dtype for leaf in leaves if leaf.is_floating_point()]
        return {
            "plan": self.plan,
            "outputs": [{"shape": list(x.shape), "dtype": str(x.dtype), "bytes": x.numel() * x.element_size()} for x in leaves],
            "structure": self.structure,
            "mutates": self.mutates,
            "operators": operators[:256],
            "parameters": parameter_shapes(self.model),
            "precision": str(floats[0]).removeprefix("torch.") if floats else "float32",
            "device_name": torch.cuda.get_device_name(0) if device.startswith("cuda") else "cpu",
        }

    def do_expect(self, trial: str, seed: int, distribution: str, weights_seed: int | None) -> dict[str, Any]:
        """Compute and keep the expected outputs of one trial: the fp32 reference's, and a float64 oracle's where it fits."""
        import torch

        from kernels_eval.checks.inputs import flatten_outputs, randomise_weights

        if weights_seed is not None:
            self.model = self.build()
            randomise_weights(self.model, weights_seed)
        reference, _ = flatten_outputs(self.forward(self.inputs(seed, distribution)))
        inputs = self.inputs(seed, distribution)
        torch.manual_seed(seed + 1)  # a reference that draws random numbers must not draw the same ones again
        again, _ = flatten_outputs(self.forward(inputs))
        deterministic = all(_close(a, b, 1e-3) for a, b in zip(reference, again, strict=True))
        oracle, kind = self._oracle(seed, distribution, reference)
        if weights_seed is not None:
            self.model = self.build()
        self.synchronise()
        finite = all(bool(torch.isfinite(x).all()) for x in reference if x.is_floating_point())
        some = all(bool(torch.isfinite(x).any()) for x in reference if x.is_floating_point() and x.numel())
        others = [e["reference"] for e in self.expected.values()]
        same = bool(others) and all(all(_same(a, b) for a, b in zip(reference, other, strict=True)) for other in others)
        self.expected[trial] = {"reference": reference, "oracle": oracle}
        return {"finite": finite, "some_finite": some, "deterministic": deterministic, "oracle": kind, "same_as_all_others": same}

    def _oracle(self, seed: int, distribution: str, reference: list[Any]) -> tuple[list[Any], str]:
        import copy

        import torch

        from kernels_eval.checks.inputs import flatten_outputs

        inputs = self.inputs(seed, distribution)
        size = sum(x.numel() * 8 for x in [*reference, *inputs] if isinstance(x, torch.Tensor))
        if 4 * size > self.oracle_max_bytes:
            return reference, "float32"
        model, started = self.model, time.monotonic()
        try:
            wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
            self.model = copy.deepcopy(model).double() if isinstance(model, torch.nn.Module) else model
            outputs, _ = flatten_outputs(self.forward(wide))
            if [x.shape for x in outputs] == [x.shape for x in reference]:
                return outputs, "float64"
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            pass  # some operators have no float64 form, or the task casts by itself: the fp32 reference is the oracle then
        finally:
            self.model = model
            self.synchronise()
            if time.monotonic() - started > ORACLE_MAX_S:
                self.oracle_max_bytes = 0  # the remaining trials of this task take the fp32 reference
        return reference, "float32"

    def do_compare(self, trial: str, path: str, sizes: list[int]) -> dict[str, Any]:
        """Measure the candidate's bytes (in the exchange file `path`) against this trial, and against every earlier one."""
        import torch

        from kernels_eval.checks.correctness import measure, merge

        with open(path, "r+b") as handle:
            raw = mmap.mmap(handle.fileno(), 0)
        expected = self.expected[trial]
        actual, offset = [], 0
        for reference, size in zip(expected["reference"], sizes, strict=True):
            flat = (
                torch.frombuffer(raw, dtype=reference.dtype, count=reference.numel(), offset=offset)
                if size
                else reference.new_empty(0).cpu()
            )
            actual.append(flat.reshape(reference.shape).to(reference.device))
            offset += size
        measured = merge([measure(a, o, r) for a, o, r in zip(actual, expected["oracle"], expected["reference"], strict=True)])
        measured["equals_trial"] = [
            name
            for name, other in self.expected.items()
            if measured["rms"] > 1e-4 and name != trial and all(_close(a, b, 1e-4) for a, b in zip(actual, other["reference"], strict=True))
        ]
        return measured

    def do_ready(self) -> dict[str, Any]:
        """A fresh model for timing."""
        self.model = self.build()
        return {}


def _close(a: Any, b: Any, rtol: float) -> bool:
    import torch

    from kernels_eval.checks.correctness import CHUNK

    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    pairs = zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True)  # outputs can be gigabytes
    return all(torch.allclose(x, y, rtol=rtol, atol=rtol / 10, equal_nan=True) for x, y in pairs)


def _same(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    return type(a) is type(b) and (not isinstance(a, int | float | str | bool) or a == b)


class CandidateSide(Side):
    """Runs the kernel nobody trusts."""

    def __init__(self, channel: Channel, exchange: int) -> None:
        super().__init__(channel, exchange)
        self.calls: Counter[str] = Counter()
        self.libraries: dict[str, str] = {}
        self.registers_operators = False
        self.previous: tuple[list[Any], list[Any]] | None = None
        self.last_inputs: list[Any] | None = None

    def do_load(self, path: str, task_path: str, entry_point: str, init_form: str, device: str, threads: int, seed: int,
                plan: list[dict[str, Any]], libraries: dict[str, str], language: str) -> dict[str, Any]:  # fmt: skip
        from kernels_eval.checks.inputs import construct, load_module, parameter_shapes

        self.prepare_device(device, threads)
        self.plan, self.libraries = plan, libraries
        intercept(self._provide)
        if language == "triton":
            self._count_triton()
        self.task = load_module(task_path, "task")
        module = load_module(path, "candidate")
        if not hasattr(module, "ModelNew"):
            return {"error": "missing_model_new", "detail": "the module defines no ModelNew"}
        self.build = lambda: construct(module, "ModelNew", self.task, init_form, seed, device)
        self.model = self.build()
        self.synchronise()
        return {"parameters": parameter_shapes(self.model)}

    def _provide(self, spec: dict[str, Any]) -> Any:
        import importlib.util

        from kernels_eval.build.spec import ExtensionSpec

        key = ExtensionSpec.model_validate(spec).key
        path = self.libraries.get(key)
        if path is None:  # asked for late (in a constructor, say): the parent builds it while this call waits
            self.channel.send({"build": spec})
            answer = self.channel.receive(None)
            if not answer.get("ok"):
                raise BuildFailed(answer.get("reason", "build_failed"), answer.get("log", ""))
            path = self.libraries[key] = answer["path"]
        if not spec.get("python_module", True):
            import torch

            torch.ops.load_library(path)
            self.registers_operators = True
            return None
        found = importlib.util.spec_from_file_location(spec["name"], path)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        _count_calls(module, self.calls)
        return module

    def _count_triton(self) -> None:
        from triton.runtime.jit import JITFunction

        original, calls = JITFunction.run, self.calls

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            calls[getattr(kernel, "__name__", None) or kernel.fn.__name__] += 1
            return original(kernel, *args, **kwargs)

        JITFunction.run = run

    def forward(self, inputs: list[Any]) -> Any:
        """One call. Operators that a library registered with torch.ops are seen by a dispatch mode, as they have no function to count."""
        if not self.registers_operators:
            return super().forward(inputs)
        kept: list[Any] = []
        for name in compute_operators(lambda: kept.append(super(CandidateSide, self).forward(inputs))):
            if not name.startswith(("aten.", "prim.")):
                self.calls[name] += 1
        return kept[0]

    def do_rebuild(self) -> dict[str, Any]:
        self.model = self.build()
        return {}

    def do_call(self, seed: int, distribution: str, in_place: bool) -> dict[str, Any]:
        """One forward call on inputs drawn now. `in_place` writes them over the storage of the previous call's inputs.

        Writes the outputs' bytes to the exchange buffer; returns their shapes and dtypes and what was noticed.
        """
        import torch

        from kernels_eval.checks.inputs import flatten_outputs

        inputs = self.inputs(seed, distribution)
        if in_place and self._shares_storage():
            self.previous = None  # the previous output lives in the inputs (as an in-place reference's does): it is meant to change
        if in_place and self.last_inputs is not None and len(self.last_inputs) == len(inputs):
            for index, (old, new) in enumerate(zip(self.last_inputs, inputs, strict=True)):
                if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.shape == new.shape and old.dtype == new.dtype:
                    inputs[index] = old.copy_(new)
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        counted = sum(self.calls.values())
        output = self.forward(inputs)
        self.synchronise()
        leaves, structure = flatten_outputs(output)
        kinds = [type(leaf).__name__ for leaf in leaves]
        notices = {
            "kinds": kinds,
            "plain": all(type(leaf) is torch.Tensor for leaf in leaves),
            "tensors": all(isinstance(leaf, torch.Tensor) for leaf in leaves),
            "structure": structure,
            "custom_calls": sum(self.calls.values()) - counted,
            "mutated": any(not _same(a, b) for a, b in zip(before, inputs, strict=True)),
            "previous_changed": self._previous_changed(),
        }
        if not notices["plain"]:
            return notices
        saved = [leaf.detach().clone().contiguous() for leaf in leaves]  # on its own device: outputs can be gigabytes
        self.previous, self.last_inputs = (leaves, saved), inputs
        shapes = [{"shape": list(x.shape), "dtype": str(x.dtype), "device": x.device.type} for x in saved]
        self._publish(saved)
        return notices | {"outputs": shapes}

    def _shares_storage(self) -> bool:
        import torch

        held = self.previous[0] if self.previous else []
        inputs = {x.untyped_storage().data_ptr() for x in self.last_inputs or [] if isinstance(x, torch.Tensor)}
        return any(leaf.untyped_storage().data_ptr() in inputs for leaf in held)

    def _previous_changed(self) -> bool:
        if self.previous is None:
            return False
        held, saved = self.previous
        return any(not _same(a.detach(), b) for a, b in zip(held, saved, strict=True))

    def _publish(self, tensors: list[Any]) -> None:
        import os

        import torch

        size = os.fstat(self.exchange).st_size
        counts = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if sum(counts) > size:
            return  # a wrong shape: the parent sees it in the record and reads nothing
        buffer = torch.frombuffer(mmap.mmap(self.exchange, size), dtype=torch.uint8)
        offset = 0
        for tensor, count in zip(tensors, counts, strict=True):
            if count:
                buffer[offset : offset + count] = tensor.flatten().view(torch.uint8)
            offset += count

    def do_operators(self, seed: int) -> dict[str, Any]:
        """The aten compute operators of one forward call, and the custom kernels seen so far."""
        inputs = self.inputs(seed, "declared")
        operators = compute_operators(lambda: self.forward(inputs))
        self.synchronise()
        return {"operators": sorted(set(operators))[:64], "custom": [name for name, _ in self.calls.most_common(32)]}


def _count_calls(module: ModuleType, calls: Counter[str]) -> None:
    """Make an extension module's functions count their calls."""
    for name in dir(module):
        value = getattr(module, name)
        if callable(value) and not isinstance(value, type) and not name.startswith("__"):
            setattr(module, name, _counting(name, value, calls))


def _counting(name: str, function: Any, calls: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls[name] += 1  # only what came back: a call that raises did no work
        return result

    return call
