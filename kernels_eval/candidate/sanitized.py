"""A candidate under compute-sanitizer: the role that runs the tool in a confined child, and the
tool's program, `python -m kernels_eval.candidate.sanitized REQUEST.json`.

The program makes the inputs itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from fcntl import LOCK_SH, flock
from itertools import cycle
from pathlib import Path
from types import ModuleType

import torch

from kernels_eval.candidate.build_interception import intercept, open_library
from kernels_eval.candidate.kernel_tracer import KernelTracer
from kernels_eval.config import PROGRAM_OUTPUT_BYTES, REPLAYED_CALLS
from kernels_eval.model.inputs import construct, load_candidate, load_module, make_inputs, moved
from kernels_eval.protocol import (
    DECLARED,
    ConfinedReplay,
    ProgramOutput,
    Replay,
    RunProgram,
    handles,
)
from kernels_eval.sandbox import confinement, landlock
from kernels_eval.sandbox.channel import Message
from kernels_eval.source.spec import ExtensionSpec


@handles(RunProgram)
def run_program(request: RunProgram) -> ProgramOutput:
    path = Path("said")
    with open(path, "wb") as said:
        subprocess.run(
            request.program,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ | request.environment,
            check=False,
        )
    return ProgramOutput(said=path.read_bytes()[-PROGRAM_OUTPUT_BYTES:].decode("utf-8", "replace"))


def replayed(asked: Replay, tracer: KernelTracer | None = None) -> Callable[[], object]:
    """A loaded candidate's call, on inputs of the next shape each time, watched by `tracer`. Raises
    what it raises.
    """
    spec = asked.spec.model_copy(update={"entry_point": "ModelNew", "seed": 0})
    torch.set_num_threads(spec.threads)

    def provide(build: Message) -> ModuleType | str:
        module = open_library(asked.libraries[ExtensionSpec(**build).key], build)
        if tracer and isinstance(module, ModuleType):
            tracer.wrap_module(module, module.__name__)
        return module

    intercept(provide)
    if asked.language:
        asked.language.watch(tracer or KernelTracer(on_gpu=False))
    task, module = load_module(asked.task, "task"), load_candidate(asked.candidate)
    model = moved(construct(module, task, spec), spec.device)
    inputs = [
        make_inputs(task, 0, DECLARED, asked.plan, spec.device, shape) for shape in asked.shapes
    ]
    turns = cycle(inputs)

    def forward() -> object:
        with torch.no_grad():
            return model(*next(turns))

    return forward


def confined(request: str) -> ConfinedReplay:
    """What is asked, once its file is free: imports are done by then."""
    with open(request, encoding="utf-8") as file:
        flock(file, LOCK_SH)
        asked = ConfinedReplay.model_validate_json(file.read())
    if landlock.abi():
        around = {"scratch": str(Path(request).parent), "readable": asked.readable}
        trees = [*confinement.readable(), *asked.tools]
        confinement.restrict_files(around, os.getcwd(), trees)
    return asked


def main(request: str) -> None:
    """Confine this process, load the candidate and call it. Raises what it raises."""
    asked = confined(request)
    forward = replayed(asked.replay)
    for _ in range(REPLAYED_CALLS):
        forward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(asked.done, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
