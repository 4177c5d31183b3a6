"""A correct candidate under profilers: the role that finds where a call's time goes and what its
kernels take of a multiprocessor, and the program that ncu runs, `python -m
kernels_eval.candidate.profiled REQUEST.json`.
"""

from __future__ import annotations

import sys

import torch

from kernels_eval.candidate.kernel_tracer import Function, KernelTracer, Launches
from kernels_eval.candidate.sanitized import confined, replayed
from kernels_eval.compile.cubins import Resources, resources_of
from kernels_eval.config import REPLAYED_CALLS
from kernels_eval.model.operators import Named, Values, recorded, time_operators
from kernels_eval.protocol import CandidateTimes, TimeCandidate, handles


class Recorder(KernelTracer):
    """Shows calls of own kernels to torch's profiler."""

    def watch(self, name: str, function: Function, args: Values, kwargs: Named) -> object:
        self.calls[name] += 1
        with recorded(name):
            return function(*args, **(kwargs or {}))


@handles(TimeCandidate)
def time_candidate(request: TimeCandidate) -> CandidateTimes:
    """Raises what the candidate raises."""
    replay = request.replay
    on_gpu = replay.spec.device.startswith("cuda")
    resources: dict[str, Resources] = {}
    for library in replay.libraries.values() if on_gpu else ():
        resources |= resources_of(library)
    recorder = Recorder(on_gpu)
    forward = replayed(replay, recorder)
    for _ in range(REPLAYED_CALLS):
        forward()
    launches = Launches.find() if on_gpu else None
    own = list(launches.names() if launches else recorder.calls)
    times = time_operators(forward, on_gpu, request.budget_s, own)
    held = {name: list(numbers) for name, numbers in resources.items()}
    return CandidateTimes(**times.model_dump(), resources=held)


def main(request: str) -> None:
    """Call the candidate once between the marks that ncu waits for. Raises what it raises."""
    forward = replayed(confined(request).replay)
    for _ in range(REPLAYED_CALLS):
        forward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    forward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1])
