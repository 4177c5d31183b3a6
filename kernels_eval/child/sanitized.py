"""A candidate under compute-sanitizer: the role that runs the tool in a confined child, and the
program that the tool runs, `python -m kernels_eval.child.sanitized REQUEST.json`.

The program makes the task's declared inputs itself: its outputs are compared with nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kernels_eval.isolation import confinement, landlock
from kernels_eval.isolation.channel import Message

CALLS = 2
SAID_BYTES = 16384


class Sanitizer:
    def __init__(self, *_: object) -> None: ...

    def do_run(self, program: list[str], environment: dict[str, str]) -> Message:
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


def main(request: str) -> None:
    """Confine this process, load the candidate and call it. Raises what it raises."""
    import torch

    from kernels_eval.build.spec import ExtensionSpec
    from kernels_eval.checks.inputs import construct, load_module, make_inputs, moved
    from kernels_eval.checks.trials import DECLARED, ModelSpec
    from kernels_eval.child.build_interception import intercept, open_library

    asked = json.loads(Path(request).read_text("utf-8"))
    if landlock.abi():
        around = {"scratch": str(Path(request).parent), "readable": asked["readable"]}
        confinement.restrict_files(around, os.getcwd(), confinement.readable())
    spec = ModelSpec.model_validate(asked["spec"])
    libraries = asked["libraries"]
    intercept(lambda build: open_library(libraries[ExtensionSpec(**build).key], build))
    task, module = load_module(asked["task"], "task"), load_module(asked["candidate"], "candidate")
    made = construct(module, "ModelNew", task, spec.init_form, 0, spec.construct_on)
    model, inputs = moved(made, spec.device), make_inputs(task, 0, DECLARED, None, spec.device)
    with torch.no_grad():
        for _ in range(CALLS):
            model(*inputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(asked["done"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
