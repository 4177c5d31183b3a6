"""The role of the trusted side: runs the task's own model, holds expected values, compares what a
candidate returned.

Lives in a process of its own, which no candidate code ever enters.
"""

from __future__ import annotations

import copy
import hashlib
import time
from typing import Any

import torch

from kernels_eval.checks import correctness
from kernels_eval.checks.inputs import (
    construct,
    flatten_outputs,
    load_module,
    moved,
    parameter_shapes,
    plan_inputs,
    randomise_weights,
)
from kernels_eval.checks.operators import reference_operators
from kernels_eval.child.model_runner import Side, close, same
from kernels_eval.child.output_buffer import DeviceMemory, HostMemory, read
from kernels_eval.isolation.channel import Channel

ORACLE_MAX_S = 5.0  # a float64 oracle slower than this is computed once and then done without
DIGEST_BYTES = (
    1 << 20
)  # enough to tell whether two answers are one: hashing is the processor's work
PROBES = 8
ENOUGH_ELEMENTS = 1 << 26


class Reference(Side):
    def __init__(self, channel: Channel, exchange: int) -> None:
        super().__init__(channel, exchange)
        self.expected: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, str] = {}
        self.shared: DeviceMemory | None = None

    def warm_up(self) -> None:
        super().warm_up()
        x = torch.rand(64, 64, device=self.device)
        correctness.measure(x, x.double(), x)
        for matrix in (x, x.double()):
            matrix @ matrix
        torch.conv2d(x[None, None], x[None, None, :3, :3])

    def do_share_memory(self, size: int) -> dict[str, Any]:
        """Allocate device memory that a candidate can write its outputs to. The answer carries its
        descriptor where that works."""
        if not self.on_gpu:
            return {"shared": False}
        try:
            self.shared = DeviceMemory(size)
            return {"shared": True, "_descriptors": [self.shared.descriptor()]}
        except (OSError, AttributeError, RuntimeError) as error:
            self.shared = None
            return {"shared": False, "why": str(error)[:200]}

    def do_load(
        self,
        path: str,
        entry_point: str,
        init_form: str,
        device: str,
        construct_on: str,
        threads: int,
        seed: int,
        oracle_max_bytes: int,
    ) -> dict[str, Any]:
        self.prepare_device(device, threads)
        self.oracle_max_bytes = oracle_max_bytes
        self.task = load_module(path, "task")
        self.build = lambda seed=seed: moved(
            construct(self.task, entry_point, self.task, init_form, seed, construct_on), device
        )
        self.model = self.build()
        inputs = self.inputs(seed, "declared")
        self.plan = plan_inputs(inputs)
        before = [copy.deepcopy(x) for x in inputs]
        leaves, self.structure = flatten_outputs(self.forward(inputs))
        self.mutates = any(not same(a, b) for a, b in zip(before, inputs, strict=True))
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TypeError(
                f"the reference returns {[type(leaf).__name__ for leaf in leaves]}, not tensors"
            )
        again = self.inputs(seed, "declared")
        operators = reference_operators(lambda: self.forward(again))
        self.model = self.build()
        self.synchronise()
        floats = [leaf.dtype for leaf in leaves if leaf.is_floating_point()]
        return {
            "plan": self.plan,
            "structure": self.structure,
            "mutates": self.mutates,
            "operators": operators[:256],
            "parameters": parameter_shapes(self.model),
            "precision": str(floats[0]).removeprefix("torch.") if floats else "float32",
            "device_name": torch.cuda.get_device_name(0) if self.on_gpu else "cpu",
            "input_bytes": [
                x.numel() * x.element_size() if isinstance(x, torch.Tensor) else 0 for x in inputs
            ],
            "peak_bytes_per_s": self._peak_bandwidth(),
            "cache_bytes": (
                torch.cuda.get_device_properties(0).L2_cache_size if self.on_gpu else 64 << 20
            ),
        }

    def _peak_bandwidth(self) -> float:
        """Bytes per second that device memory can move: by its clock and bus width on a GPU, by
        copying 64 MB on a CPU."""
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(0)
            clock_khz, width = (
                getattr(properties, "memory_clock_rate", 0),
                getattr(properties, "memory_bus_width", 0),
            )
            return 2.0 * clock_khz * 1e3 * width / 8
        block = torch.ones(8 << 20, dtype=torch.float64)
        target = torch.empty_like(block)
        best = float("inf")
        for _ in range(4):
            started = time.perf_counter()
            target.copy_(block)
            best = min(best, time.perf_counter() - started)
        return 2 * block.numel() * 8 / best

    # -- expected values ---------------------------------------------------------------------------

    def do_expect(
        self,
        trial: str,
        seed: int,
        distribution: str,
        weights_seed: int | None = None,
        shape: str = "declared",
        evaluate: bool = False,
        construct_seed: int | None = None,
    ) -> dict[str, Any]:
        """Compute and keep the expected outputs of one trial: the fp32 reference's, and a float64
        oracle's where it fits."""
        special = weights_seed is not None or evaluate or construct_seed is not None
        try:
            if special:
                self.model = self.build() if construct_seed is None else self.build(construct_seed)
            if weights_seed is not None:
                randomise_weights(self.model, weights_seed)
            if evaluate and isinstance(self.model, torch.nn.Module):
                self.model.eval()
            reference, _ = flatten_outputs(self.forward(self.inputs(seed, distribution, shape)))
            inputs = self.inputs(seed, distribution, shape)
            torch.manual_seed(
                seed + 1
            )  # a reference that draws random numbers must not draw the same ones again
            again, _ = flatten_outputs(self.forward(inputs))
            bit_identical = all(same(a, b) for a, b in zip(reference, again, strict=True))
            deterministic = bit_identical or all(
                close(a, b, 1e-3) for a, b in zip(reference, again, strict=True)
            )
            oracle, kind = self._oracle(seed, distribution, shape, reference)
        finally:
            if special:
                self.model = self.build()
        self.synchronise()
        zeros = [_measure_zeros(o, r) for o, r in zip(oracle, reference, strict=True)]
        equals = [
            name
            for name, other in self.expected.items()
            if len(other["reference"]) == len(reference)
            and all(same(a, b) for a, b in zip(reference, other["reference"], strict=True))
        ]
        self.expected[trial] = {"reference": reference, "oracle": oracle}
        del again, inputs
        self.give_back_memory()
        return {
            "finite": all(
                bool(torch.isfinite(x).all()) for x in reference if x.is_floating_point()
            ),
            "some_finite": all(
                bool(torch.isfinite(x).any())
                for x in reference
                if x.is_floating_point() and x.numel()
            ),
            "deterministic": deterministic,
            "bit_identical": bit_identical,
            "oracle": kind,
            "equals": equals,
            "zeros": correctness.merge(zeros),
            "outputs": [
                {
                    "shape": list(x.shape),
                    "dtype": str(x.dtype),
                    "device": x.device.type,
                    "bytes": x.numel() * x.element_size(),
                }
                for x in reference
            ],
        }

    def do_forget(self, trial: str) -> dict[str, Any]:
        self.expected.pop(trial, None)
        return {}

    def _oracle(
        self, seed: int, distribution: str, shape: str, reference: list[Any]
    ) -> tuple[list[Any], str]:
        inputs = self.inputs(seed, distribution, shape)
        size = sum(x.numel() * 8 for x in [*reference, *inputs] if isinstance(x, torch.Tensor))
        if 4 * size > self.oracle_max_bytes:
            return reference, "float32"
        model, started = self.model, time.monotonic()
        try:
            wide = [
                x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in inputs
            ]
            self.model = (
                copy.deepcopy(model).double() if isinstance(model, torch.nn.Module) else model
            )
            outputs, _ = flatten_outputs(self.forward(wide))
            if [x.shape for x in outputs] == [x.shape for x in reference]:
                return outputs, "float64"
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            # some operators have no float64 form, or the task casts by itself: the fp32 reference
            # is the oracle then
            pass
        finally:
            self.model = model
            self.synchronise()
            if time.monotonic() - started > ORACLE_MAX_S:
                self.oracle_max_bytes = (
                    0  # the remaining trials of this task take the fp32 reference
                )
        return reference, "float32"

    # -- what the task depends on ------------------------------------------------------------------

    def do_ignored_inputs(self, seed: int) -> dict[str, Any]:
        """Positions of arguments that may vary and do not change the output."""
        if sum(x.numel() for x in self.expected["declared"]["reference"]) > ENOUGH_ELEMENTS:
            return {"ignored": []}  # another copy of everything for a flag is too much
        base, _ = flatten_outputs(self.forward(self.inputs(seed, "declared")))
        ignored = []
        for index, note in enumerate(self.plan["notes"]):
            if note["vary"]:
                inputs = self.inputs(seed, "declared")
                inputs[index] = self.inputs(seed + 1, "normal")[index]
                if not self._differs(base, inputs):
                    ignored.append(index)
        return {"ignored": ignored}

    def _differs(self, base: list[torch.Tensor], inputs: list[Any]) -> bool:
        """Is the output of these inputs another one? A task that refuses them depends on them: not
        every matrix has a Cholesky factor."""
        try:
            outputs, _ = flatten_outputs(self.forward(inputs))
        except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError):
            return True
        return not all(same(a, b) for a, b in zip(base, outputs, strict=True))

    def do_used_bytes(self, seed: int) -> dict[str, Any]:
        """Bytes of the arguments that the output depends on, estimated by changing one of 8 spread
        pieces of each at a time."""
        base, _ = flatten_outputs(self.forward(self.inputs(seed, "declared")))
        used = 0.0
        for index, note in enumerate(self.plan["notes"]):
            if not note["vary"]:
                continue
            hits = 0
            for probe in range(PROBES):
                inputs = self.inputs(seed, "declared")
                flat = inputs[index].reshape(-1)
                start = flat.numel() * probe // PROBES
                flat[start : start + max(1, flat.numel() // 64)] += 3.0
                inputs[index] = flat.reshape(inputs[index].shape)
                hits += self._differs(base, inputs)
            used += inputs[index].numel() * inputs[index].element_size() * hits / PROBES
        return {"bytes": used}

    def do_weights_matter(self, seed: int, weights_seed: int, only: list[int]) -> dict[str, Any]:
        """Does the output change when these parameters (by position) get other values?"""
        base, _ = flatten_outputs(self.forward(self.inputs(seed, "declared")))
        try:
            self.model = self.build()
            randomise_weights(self.model, weights_seed, only=only)
            outputs, _ = flatten_outputs(self.forward(self.inputs(seed, "declared")))
        finally:
            self.model = self.build()
        return {"matter": not all(close(a, b, 1e-4) for a, b in zip(outputs, base, strict=True))}

    # -- comparing ---------------------------------------------------------------------------------

    def do_new_candidate(self) -> dict[str, Any]:
        self.digests = {}
        return {}

    def do_compare(self, trial: str, path: str) -> dict[str, Any]:
        """Measure the candidate's bytes (in the exchange file `path`, or in the device memory that
        it shares) against this trial, and against every earlier one."""
        actual = read(self.shared or _host_memory(path), self.expected[trial]["reference"])
        digest = hashlib.blake2b(digest_size=16)
        for tensor in actual:
            digest.update(tensor.flatten().view(torch.uint8)[:DIGEST_BYTES].cpu().numpy().tobytes())
        measured = self._measured(trial, actual)
        measured["equals_trial"] = [
            name
            for name, other in self.expected.items()
            if measured["rms"] > 1e-4
            and name != trial
            and name in self.digests  # one that this candidate has been asked
            and all(close(a, b, 1e-4) for a, b in zip(actual, other["reference"], strict=True))
        ]
        measured["equals_answer"] = [
            name
            for name, other in self.digests.items()
            if other == digest.hexdigest() and name != trial and not self._alike(name, trial)
        ]
        self.digests[trial] = digest.hexdigest()
        del actual
        self.give_back_memory()
        return measured

    def _alike(self, trial: str, other: str) -> bool:
        """Is the right answer to both the same? It is where a task's inputs are written out, and
        not drawn."""
        one, two = (
            self.expected[name]["reference"] if name in self.expected else None
            for name in (trial, other)
        )
        return (
            one is not None
            and two is not None
            and len(one) == len(two)
            and all(same(a, b) for a, b in zip(one, two, strict=True))
        )

    def do_measure(self, trial: str, path: str) -> dict[str, Any]:
        """Measure the bytes in the file `path` against this trial: those of our own compiled side,
        of which nothing is remembered."""
        actual = read(_host_memory(path), self.expected[trial]["reference"])
        measured = self._measured(trial, actual)
        del actual
        self.give_back_memory()
        return measured

    def _measured(self, trial: str, actual: list[torch.Tensor]) -> dict[str, Any]:
        expected = self.expected[trial]
        pairs = zip(actual, expected["oracle"], expected["reference"], strict=True)
        return correctness.merge([correctness.measure(a, o, r) for a, o, r in pairs])


def _host_memory(path: str) -> HostMemory:
    with open(path, "r+b") as handle:
        return HostMemory(handle.fileno())


def _measure_zeros(oracle: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    """How an output of zeros would compare, seen on the first elements of a large one."""
    oracle, reference = (x.reshape(-1)[:ENOUGH_ELEMENTS] for x in (oracle, reference))
    return correctness.measure(torch.zeros_like(reference), oracle, reference)
