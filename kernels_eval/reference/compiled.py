"""The role that runs a task's reference under torch.compile: a second baseline.

It has a process of its own, which no candidate code ever enters.

Guarantees: dynamo, inductor and their caches are this process's alone (a private scratch, an
environment of its own), so nothing that a candidate does to torch reaches them; nothing runs
eagerly in silence: a reference of which no graph was compiled is an error, and so is one that is
compiled anew too often. Does not guarantee that the compiled reference is right: the parent has
that compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels_eval.checks.inputs import flatten_outputs
from kernels_eval.child.model_runner import described, now_ns
from kernels_eval.child.shared_memory import write
from kernels_eval.isolation.channel import Message
from kernels_eval.reference.task_runner import TaskRunner

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
    """Serves one task: `do_load`, `do_compile`, `do_answer`, then `do_timing_inputs` and
    `do_sample`."""

    def do_compile(self, mode: str, seed: int) -> Message:
        """Compile the model by calling it on the inputs of this seed. Raises what the compiler
        raises, and NothingCompiled."""
        import torch._dynamo.config
        import torch._inductor.config

        _set(torch._dynamo.config, DYNAMO)
        _set(torch._inductor.config, INDUCTOR)
        self.model = torch.compile(self.model, mode=None if mode == "default" else mode)
        self.forward(self.inputs(seed))
        self.synchronise()
        if not self.graphs:
            raise NothingCompiled("torch.compile found no graph in it: all of it runs in Python")
        return {"graphs": self.graphs}

    @property
    def graphs(self) -> int:
        """Graphs compiled so far in this process, those of every new compilation included."""
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    def do_answer(self, seed: int) -> Message:
        """Call the compiled model on the inputs of this seed, and write its outputs' bytes to the
        memory that comes with this message."""
        output = self.forward(self.inputs(seed))
        leaves, structure = flatten_outputs(output)
        # CUDA graphs write over an output with the next call
        write(self.memory(on_device=False), [[leaf.detach().clone() for leaf in leaves]])
        self.synchronise()
        return described(output, leaves, structure)

    def do_timing_inputs(self, seeds: list[int]) -> Message:
        """As the other roles, and then one call on each set outside the clock, as long as these
        take little: what is compiled anew for one of them, or recorded with the second call, is
        compiled here."""
        answer, started = super().do_timing_inputs(seeds), now_ns()
        for number, inputs in enumerate(self.timed_inputs):
            if number >= FEWEST_FIRST_CALLS and now_ns() - started > FIRST_CALLS_S * 1e9:
                break
            self.forward(inputs)
        self.synchronise()
        return answer | {"graphs": self.graphs}

    def do_sample(self, calls: int, only: str = "") -> Message:
        return super().do_sample(calls, only) | {"graphs": self.graphs}


def _set(config: object, values: Mapping[str, object]) -> None:
    """Settings of torch's compilers, those that this torch knows."""
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
