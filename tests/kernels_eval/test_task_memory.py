"""Memory that the reference's process shares with a candidate's."""

import os
from types import SimpleNamespace

import pytest

from kernels_eval.judge.task_memory import TaskMemory
from kernels_eval.protocol import Shared


@pytest.mark.parametrize("room, on_device", [(2, True), (1, False), (0, False)])
def test_outputs_that_are_compared_lie_in_one_place(room, on_device):
    channel, given = SimpleNamespace(descriptors=[]), []

    def answer(request, fds):
        if not request.on_device:
            assert len(fds) == 1
            return Shared(shared=True)
        given.append(request.whose)
        if len(given) > room:
            return Shared(shared=False)
        channel.descriptors.append(os.open(os.devnull, os.O_RDONLY))
        return Shared(shared=True)

    memory = TaskMemory(answer, channel, on_device=True)
    memory.share(4096, "own", "unseen")
    places = {memory.shared(name)[0].on_device for name in ("own", "unseen")}
    memory.close()
    assert places == {on_device}
