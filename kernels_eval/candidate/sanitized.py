"""A candidate under compute-sanitizer: the role that runs the tool in a confined child, and the
program that the tool runs, `python -m kernels_eval.candidate.sanitized REQUEST.json`.

The program makes the task's declared inputs itself: its outputs are compared with nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from kernels_eval.candidate.build_interception import intercept, open_library
from kernels_eval.candidate.kernel_tracer import KernelTracer
from kernels_eval.languages import Language
from kernels_eval.model.inputs import construct, load_candidate, load_module, make_inputs, moved
from kernels_eval.model.trials import DECLARED, ModelSpec
from kernels_eval.sandbox import confinement, landlock
from kernels_eval.sandbox.channel import Answer, Message
from kernels_eval.source.spec import ExtensionSpec

CALLS = 2
SAID_BYTES = 1 << 18


def do_run(program: list[str], environment: dict[str, str]) -> Message:
    """Run a program here, with everything that this child may and may not do. Returns the end
    of what it printed."""
    path = Path("said")
    with open(path, "wb") as said:
        subprocess.run(
            program,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ | environment,
            check=False,
        )
    return {"said": path.read_bytes()[-SAID_BYTES:].decode("utf-8", "replace")}


def replayed(asked: Answer, tracer: KernelTracer | None = None) -> Callable[[], object]:
    """Load the candidate: its forward call on the task's declared inputs. A `tracer` watches its
    kernels. Raises what the candidate raises."""
    spec = ModelSpec.model_validate(asked["spec"] | {"entry_point": "ModelNew", "seed": 0})
    torch.set_num_threads(spec.threads)
    libraries = asked["libraries"]

    def provide(build: Message) -> ModuleType | str:
        module = open_library(libraries[ExtensionSpec(**build).key], build)
        if tracer and isinstance(module, ModuleType):
            tracer.wrap_module(module, module.__name__)
        return module

    intercept(provide)
    if "language" in asked:
        Language(asked["language"]).watch(tracer or KernelTracer(on_gpu=False))
    task, module = load_module(asked["task"], "task"), load_candidate(asked["candidate"])
    model = moved(construct(module, task, spec), spec.device)
    inputs = make_inputs(task, 0, DECLARED, None, spec.device)

    def forward() -> object:
        with torch.no_grad():
            return model(*inputs)

    return forward


def confined(request: str) -> Answer:
    """What the request asks; this process is confined from here on."""
    asked: Answer = json.loads(Path(request).read_text("utf-8"))
    if landlock.abi():
        around = {"scratch": str(Path(request).parent), "readable": asked["readable"]}
        trees = [*confinement.readable(), *asked.get("tools", ())]
        confinement.restrict_files(around, os.getcwd(), trees)
    return asked


def main(request: str) -> None:
    """Confine this process, load the candidate and call it. Raises what it raises."""
    asked = confined(request)
    forward = replayed(asked)
    for _ in range(CALLS):
        forward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(asked["done"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
