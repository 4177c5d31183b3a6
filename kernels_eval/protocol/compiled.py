"""Messages of the process that runs a task's reference under torch.compile."""

from __future__ import annotations

from kernels_eval.protocol.message import Count, Done, Report, Request
from kernels_eval.protocol.model import CallReport, ModelSpec
from kernels_eval.protocol.reference import Comparison


class LoadModel(Request[Done]):
    path: str
    spec: ModelSpec


class CompileReport(Report):
    graphs: Count


class Compile(Request[CompileReport]):
    """Compile the model by calling it on the inputs of this seed."""

    mode: str
    seed: int


class AnswerCompiled(Request[CallReport]):
    """Call the compiled model on this seed's inputs; write its outputs to the memory that comes
    along.
    """

    seed: int


class MeasureCompiled(Request[Comparison]):
    """Compare what the compiled reference wrote to the memory that comes along."""

    trial: str
