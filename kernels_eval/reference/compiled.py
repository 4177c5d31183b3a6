"""The role that runs a task's reference under torch.compile. The compiler's caches are this
process's alone; a reference without a compiled graph, or compiled anew too often, is an error."""

from __future__ import annotations

from collections.abc import Mapping

from kernels_eval.config import FEWEST_FIRST_CALLS, FIRST_CALLS_S
from kernels_eval.model.inputs import flatten_outputs
from kernels_eval.model.model_runner import described, now_ns
from kernels_eval.model.shared_memory import write
from kernels_eval.protocol import (
    AnswerCompiled,
    CallReport,
    Compile,
    CompileReport,
    Done,
    DrawnTimingInputs,
    DrawTimingInputs,
    LoadModel,
    Sample,
    SampleReport,
    handles,
)
from kernels_eval.reference.task_model import TaskModel
from kernels_eval.sandbox.channel import Channel

INDUCTOR = {
    "compile_threads": 1,  # here and now: a pool of processes would go on beside what is timed
    "fx_graph_remote_cache": False,
    "autotune_remote_cache": False,
}
DYNAMO = {
    "suppress_errors": False,
    "fail_on_recompile_limit_hit": True,
}  # either way it would go on eagerly and not say so


class NothingCompiled(RuntimeError):
    """torch.compile left all of the reference to Python."""


class CompiledRole:
    """Serves one task: loads and compiles it, answers, and is then timed."""

    def __init__(self, channel: Channel) -> None:
        self.task = TaskModel(channel)
        self.runner = self.task.runner
        self.parts = self, self.task, self.runner

    def end_command(self, command: str) -> None:
        self.runner.trim_memory(command)

    @handles(LoadModel)
    def load(self, request: LoadModel) -> Done:
        self.task.load(request.path, request.spec)
        return Done()

    @handles(Compile)
    def compile(self, request: Compile) -> CompileReport:
        """Raises what the compiler raises, and NothingCompiled."""
        import torch._dynamo.config
        import torch._inductor.config

        _set(torch._dynamo.config, DYNAMO)
        _set(torch._inductor.config, INDUCTOR)
        self.runner.model = torch.compile(
            self.runner.model, mode=None if request.mode == "default" else request.mode
        )
        self.runner.forward(self.task.inputs(request.seed))
        self.runner.synchronise()
        if not self.graphs:
            raise NothingCompiled("torch.compile found no graph in it: all of it runs in Python")
        return CompileReport(graphs=self.graphs)

    @property
    def graphs(self) -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    @handles(AnswerCompiled)
    def answer(self, request: AnswerCompiled) -> CallReport:
        output = self.runner.forward(self.task.inputs(request.seed))
        leaves, structure = flatten_outputs(output)
        # CUDA graphs write over an output with the next call
        write(self.runner.memory(), [[leaf.detach().clone() for leaf in leaves]])
        self.runner.synchronise()
        return described(output, leaves, structure, layout=0)

    @handles(DrawTimingInputs)
    def draw_timing_inputs(self, request: DrawTimingInputs) -> DrawnTimingInputs:
        """Draw, then call once on each set while that is quick, so that recompilation is not
        timed.
        """
        answer, started = self.task.draw_timing_inputs(request), now_ns()
        for number, inputs in enumerate(self.runner.timed_inputs):
            if number >= FEWEST_FIRST_CALLS and now_ns() - started > FIRST_CALLS_S * 1e9:
                break
            self.runner.forward(inputs)
        self.runner.synchronise()
        return answer.model_copy(update={"graphs": self.graphs})

    @handles(Sample)
    def sample(self, request: Sample) -> SampleReport:
        return self.runner.sample(request).model_copy(update={"graphs": self.graphs})


def _set(config: object, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
