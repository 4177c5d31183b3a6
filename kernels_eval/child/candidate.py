"""The role that runs the kernel nobody trusts.

What this process says of itself (call counts, flags, its own times) is testimony; its outputs are
bytes that the reference process compares, and its times are bounded by the parent's clock.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from typing import Any

import torch

from kernels_eval.build.spec import ExtensionSpec
from kernels_eval.checks import state
from kernels_eval.checks.inputs import (
    construct,
    flatten_outputs,
    load_module,
    made_elsewhere,
    moved,
    parameter_shapes,
)
from kernels_eval.checks.operators import compute_operators
from kernels_eval.child.build_interception import BuildFailed, intercept
from kernels_eval.child.kernel_launches import Launches
from kernels_eval.child.kernel_tracer import Witness
from kernels_eval.child.model_runner import Side, _now_ns, poison_allocations, same
from kernels_eval.child.output_buffer import DeviceMemory, HostMemory, write
from kernels_eval.isolation.channel import Channel

LARGE_BYTES = 1 << 30  # outputs above this are repeated once only
PATIENCE_S = 0.3  # calls that only sharpen a judgement are repeated no longer than this
SHARE_S = 0.1
SPOILS = (
    1.0e4,
    -3.7e3,
)  # finite: a result that is multiplied by zero must not look as if it mattered


class CandidateSide(Side):
    def __init__(self, channel: Channel, exchange: int) -> None:
        super().__init__(channel, exchange)
        self.libraries: dict[str, str] = {}
        self.registers_operators = False
        self.previous: tuple[list[Any], list[Any]] | None = None
        self.last_inputs: list[Any] | None = None
        self.last_output: Any = None
        self.state: dict[str, str] = {}
        self.memory: HostMemory | DeviceMemory | None = None
        self.launches: Launches | None = None
        self.exchange_bytes = 0

    # -- loading -----------------------------------------------------------------------------------

    def do_load(
        self,
        path: str,
        task_path: str,
        entry_point: str,
        init_form: str,
        device: str,
        construct_on: str,
        threads: int,
        seed: int,
        plan: dict[str, Any],
        libraries: dict[str, str],
        language: str,
        exchange_bytes: int,
    ) -> dict[str, Any]:
        self.prepare_device(device, threads)
        self.state = state.snapshot(device)
        self.witness = Witness(self.on_gpu)
        self.plan, self.libraries, self.exchange_bytes = (
            plan,
            libraries,
            exchange_bytes,
        )  # bytes of device memory; 0: a file
        intercept(self._provide)
        if language == "triton":
            self.witness.wrap_triton()
        self.task = load_module(task_path, "task")
        module = load_module(path, "candidate")
        if not hasattr(module, "ModelNew"):
            return {"error": "missing_model_new", "detail": "the module defines no ModelNew"}
        self.build = lambda seed=seed: moved(
            construct(module, "ModelNew", self.task, init_form, seed, construct_on), device
        )
        made = construct(module, "ModelNew", self.task, init_form, seed, construct_on)
        elsewhere = made_elsewhere(made, construct_on)
        self.model = moved(made, device)
        self.synchronise()
        return {"parameters": parameter_shapes(self.model), "made_elsewhere": elsewhere}

    def _provide(self, spec: dict[str, Any]) -> Any:
        key = ExtensionSpec.model_validate(spec).key
        path = self.libraries.get(key)
        if path is None or not os.path.exists(
            path
        ):  # asked for late (in a constructor, say), or evicted: the parent builds it now
            self.channel.send({"build": spec})
            answer = self.channel.receive(None)
            if not answer.get("ok"):
                raise BuildFailed(answer.get("reason", "build_failed"), answer.get("log", ""))
            path = self.libraries[key] = answer["path"]
        if not spec.get("python_module", True):
            torch.ops.load_library(path)
            self.registers_operators = True
            self._find_launches()
            return None
        found = importlib.util.spec_from_file_location(spec["name"], path)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        self.witness.wrap_module(module)
        self._find_launches()
        return module

    def _find_launches(self) -> None:
        if self.launches is None and self.on_gpu and (found := Launches.find()):
            found.expect_stream(torch.cuda.default_stream().cuda_stream)
            self.launches = found

    @property
    def worked(self) -> int:
        """Calls of custom kernels so far: launches where they can be counted, else calls of
        functions that hold them."""
        return self.launches.total if self.launches else sum(self.witness.calls.values())

    def forward(self, inputs: list[Any]) -> Any:
        """One call. Operators that a library registered with torch.ops are seen by a dispatch mode,
        as they have no function to wrap."""
        with self.witness.operators() if self.registers_operators else nullcontext():
            return super().forward(inputs)

    def do_rebuild(self, seed: int | None = None) -> dict[str, Any]:
        self.model = self.build() if seed is None else self.build(seed)
        return {}

    # -- one compared call -------------------------------------------------------------------------

    def do_call(
        self,
        seed: int,
        distribution: str,
        in_place: bool = False,
        shape: str = "declared",
        evaluate: bool = False,
        reruns: int = 0,
        output_bytes: int = 0,
        devices: list[str] | None = None,
    ) -> dict[str, Any]:
        """One forward call on inputs drawn now. `in_place` writes them over the storage of the
        previous call's inputs.

        Writes the outputs' bytes to the exchange buffer; returns their shapes and dtypes and what
        was noticed. With `reruns`, the same call is made again on the same inputs, and the bytes
        are those of the last. Where the outputs are not on `devices`, that is all there is to say:
        copying gigabytes from another one takes longer than everything else.
        """
        inputs = self.inputs(seed, distribution, shape)
        if in_place and self._shares_storage():
            # the previous output lives in the inputs (as an in-place reference's does): it is meant
            # to change
            self.previous = None
        if in_place and self.last_inputs is not None and len(self.last_inputs) == len(inputs):
            for index, (old, new) in enumerate(zip(self.last_inputs, inputs, strict=True)):
                if (
                    isinstance(old, torch.Tensor)
                    and isinstance(new, torch.Tensor)
                    and old.shape == new.shape
                    and old.dtype == new.dtype
                ):
                    inputs[index] = old.copy_(new)
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        counted = self.worked
        output, outstanding = self._poisoned(inputs, output_bytes, evaluate)
        leaves, structure = flatten_outputs(output)
        notices = {
            "kinds": [type(leaf).__name__ for leaf in leaves],
            "devices": _devices(leaves),
            "plain": all(type(leaf) is torch.Tensor for leaf in leaves),
            "tensors": all(isinstance(leaf, torch.Tensor) for leaf in leaves),
            "structure": structure,
            "custom_calls": self.worked - counted,
            "mutated": any(not same(a, b) for a, b in zip(before, inputs, strict=True)),
            "previous_changed": self._previous_changed(),
            "outstanding_share": outstanding,
        }
        if not notices["plain"] or notices["devices"] != (devices or notices["devices"]):
            return notices
        saved = [
            leaf.detach().clone().contiguous() for leaf in leaves
        ]  # on its own device: outputs can be gigabytes
        self.previous, self.last_inputs = (leaves, saved), inputs
        del before, output
        large = sum(x.numel() * x.element_size() for x in saved) > LARGE_BYTES
        started = _now_ns()
        for number in range(0 if notices["mutated"] else min(reruns, 1) if large else reruns):
            if number and _now_ns() - started > PATIENCE_S * 1e9:
                break
            again, _ = flatten_outputs(self._poisoned(inputs, output_bytes, evaluate)[0])
            self.synchronise()
            if [type(x) for x in again] != [type(x) for x in saved] or not all(
                same(a, b) for a, b in zip(saved, again, strict=True)
            ):
                notices["rerun_differs"] = True
            saved = [
                leaf.detach().clone().contiguous()
                for leaf in again
                if isinstance(leaf, torch.Tensor)
            ]
        published = self._published(saved)
        self.give_back_memory()
        return notices | published

    def _poisoned(self, inputs: list[Any], output_bytes: int, evaluate: bool) -> tuple[Any, float]:
        """One forward call with free memory filled with nonsense. Also returns the share of the
        call's time in which work was still going on after the current stream had been waited for (0
        on the CPU)."""
        module = self.model if isinstance(self.model, torch.nn.Module) else None
        training = module.training if module is not None else True
        if evaluate and module is not None:
            module.eval()
        try:
            if not self.on_gpu:
                poison_allocations(True)
                return self.forward(inputs), 0.0
            self._poison_gpu(output_bytes)
            self.synchronise()
            started = _now_ns()
            output = self.forward(inputs)
            torch.cuda.default_stream().synchronize()
            joined = _now_ns()
            self.synchronise()
            ended = _now_ns()
            return output, max(0, ended - joined - 30_000) / max(1, ended - started)
        finally:
            poison_allocations(False)
            if evaluate and module is not None:
                module.train(training)

    def _poison_gpu(self, output_bytes: int) -> None:
        """Leave blocks full of NaN in torch's allocator, of the size that the outputs will ask
        for."""
        free, _ = torch.cuda.mem_get_info()
        if output_bytes and 2 * output_bytes < free // 4:
            blocks = [
                torch.empty(output_bytes, dtype=torch.uint8, device=self.device).fill_(0xFF)
                for _ in range(2)
            ]
            del blocks

    def _shares_storage(self) -> bool:
        held = self.previous[0] if self.previous else []
        inputs = {
            x.untyped_storage().data_ptr()
            for x in self.last_inputs or []
            if isinstance(x, torch.Tensor)
        }
        return any(leaf.untyped_storage().data_ptr() in inputs for leaf in held)

    def _previous_changed(self) -> bool:
        if self.previous is None:
            return False
        held, saved = self.previous
        return any(not same(a.detach(), b) for a, b in zip(held, saved, strict=True))

    def _published(self, tensors: list[Any]) -> dict[str, Any]:
        """Write the tensors' bytes to the exchange buffer and return their forms."""
        if self.memory is None:
            self.memory = (
                DeviceMemory(self.exchange_bytes, self.exchange)
                if self.exchange_bytes
                else HostMemory(self.exchange)
            )
        write(self.memory, tensors)
        self.synchronise()
        return {"outputs": [{"shape": list(x.shape), "dtype": str(x.dtype)} for x in tensors]}

    # -- timing ------------------------------------------------------------------------------------

    def do_timing_inputs(self, seeds: list[int]) -> dict[str, Any]:
        self.previous = self.last_inputs = self.last_output = (
            None  # the comparisons are over: their memory is needed
        )
        self.give_back_memory()
        return super().do_timing_inputs(seeds)

    def do_sample(self, calls: int) -> dict[str, Any]:
        counted = self.worked
        answer = super().do_sample(calls)
        return answer | {"custom_calls": self.worked - counted}

    def do_unseen(self, seeds: list[int]) -> dict[str, Any]:
        """Draw inputs that no earlier call has seen, for `do_run_unseen`."""
        self.last_output = None
        self.unseen = [self.inputs(seed, "declared") for seed in seeds]
        self.synchronise()
        return {}

    def do_run_unseen(self) -> dict[str, Any]:
        """Call the model once on each of them. The parent's clock runs; the last output is kept."""
        output, model = None, self.model
        with torch.no_grad():
            for inputs in self.unseen:
                output = model(*inputs)
        self.synchronise()
        self.last_output, self.unseen = output, []
        return {}

    def do_last_output(self) -> dict[str, Any]:
        self.timed_inputs = []  # timing is over: their memory is needed for the comparison
        leaves, structure = flatten_outputs(self.last_output)
        plain = all(type(leaf) is torch.Tensor for leaf in leaves)
        answer = {
            "plain": plain,
            "tensors": plain,
            "structure": structure,
            "kinds": [type(leaf).__name__ for leaf in leaves],
        }
        answer["devices"] = _devices(leaves)
        return (
            answer | self._published([leaf.detach().contiguous() for leaf in leaves])
            if plain
            else answer
        )

    # -- what was noticed --------------------------------------------------------------------------

    def do_state(self) -> dict[str, Any]:
        """Settings that are no longer what they were before the candidate was loaded."""
        return {"changed": state.changes(self.state, state.snapshot(self.device))}

    def do_operators(self, seed: int) -> dict[str, Any]:
        """The aten compute operators of one forward call, and the custom kernels seen so far."""
        inputs = self.inputs(seed, "declared")
        operators = compute_operators(lambda: self.forward(inputs))
        self.synchronise()
        names = self.launches.names() if self.launches else dict(self.witness.calls.most_common())
        return {
            "operators": sorted(set(operators))[:64],
            "custom": list(names)[:32],
            "off_stream": self.launches.off_stream if self.launches else 0,
        }

    def do_share(self, seed: int) -> dict[str, Any]:
        """Share of a forward call's time that is spent in custom kernels: the median of five calls,
        or of fewer slow ones."""
        shares, began = [], _now_ns()
        while len(shares) < 5 and (not shares or _now_ns() - began < SHARE_S * 1e9):
            inputs = self.inputs(seed, "declared")
            self.synchronise()
            self._time_kernels(True)
            try:
                if self.on_gpu:
                    begin, end = (
                        torch.cuda.Event(enable_timing=True),
                        torch.cuda.Event(enable_timing=True),
                    )
                    begin.record()
                    self.forward(inputs)
                    end.record()
                    self.synchronise()
                    total = begin.elapsed_time(end) * 1e6
                else:
                    started = _now_ns()
                    self.forward(inputs)
                    total = _now_ns() - started
                spent = (
                    self.launches.elapsed_ms() * 1e6 if self.launches else self.witness.take_ns()
                )
            finally:
                self._time_kernels(False)
            shares.append(min(1.0, spent / max(total, 1.0)))
        return {"share": sorted(shares)[len(shares) // 2]}

    def _time_kernels(self, on: bool) -> None:
        if self.launches:
            self.launches.reset()
            self.launches.mode(timed=on)
        else:
            self.witness.timing = on

    def do_ornamental(self, seed: int, distributions: list[str]) -> dict[str, Any]:
        """Does the output stay the same when what the kernels wrote is replaced? Then they are an
        ornament.

        Asked on the first of these distributions whose answers differ from one draw to the next.
        Where none does, nothing would show: what is left in memory is then the right answer.
        """
        found = self._telling(seed, distributions)
        if found is None:
            return {"ornamental": False}
        distribution, expected = found
        for value in SPOILS:
            self.forward(
                self.inputs(seed + 1, distribution)
            )  # buffers that live on hold another answer now: a write shows as a change
            inputs = self.inputs(seed, distribution)
            self.witness.spoil = value
            try:
                leaves, _ = flatten_outputs(self.forward(inputs))
                self.synchronise()
            except Exception:
                return {"ornamental": False}  # what the kernels made was used
            finally:
                self.witness.spoil = None
            if not all(same(a, b.detach()) for a, b in zip(expected, leaves, strict=True)):
                return {
                    "ornamental": self._unchanged_without_launches(seed, distribution, expected)
                }
        return {"ornamental": True}

    def _telling(self, seed: int, distributions: list[str]) -> tuple[str, list[Any]] | None:
        """The first distribution under which two draws have two answers, and the answer to the
        first draw."""
        for distribution in distributions:
            expected = [
                leaf.detach().clone()
                for leaf in flatten_outputs(self.forward(self.inputs(seed, distribution)))[0]
            ]
            other, _ = flatten_outputs(self.forward(self.inputs(seed + 1, distribution)))
            self.synchronise()
            if not all(same(a, b.detach()) for a, b in zip(expected, other, strict=True)):
                return distribution, expected
        return None

    def _unchanged_without_launches(
        self, seed: int, distribution: str, expected: list[Any]
    ) -> bool:
        """Is the output the same when no kernel of the candidate's libraries is launched at all?"""
        if not self.launches:
            return False
        self.forward(
            self.inputs(seed + 1, distribution)
        )  # memory that is used again holds another answer
        inputs = self.inputs(seed, distribution)
        self.launches.mode(null=True)
        try:
            leaves, _ = flatten_outputs(self.forward(inputs))
            self.synchronise()
        except Exception:
            return False
        finally:
            self.launches.mode()
        return all(same(a, b.detach()) for a, b in zip(expected, leaves, strict=True))


def _devices(leaves: list[Any]) -> list[str]:
    return [leaf.device.type if isinstance(leaf, torch.Tensor) else "" for leaf in leaves]
