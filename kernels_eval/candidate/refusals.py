"""Refuses to a candidate's Python, under whatever name, the functions that lead out of it: hooks on
every call, frames, the garbage collector's objects, ctypes. Libraries that it calls may use them.
Guarantees nothing about native code."""

from __future__ import annotations

import os
import sys

from kernels_eval.model.failures import KnownFailure
from kernels_eval.records import Reason

EVENTS = frozenset(
    """sys.settrace sys.setprofile sys._getframe sys._current_frames sys._current_exceptions
    gc.get_objects gc.get_referrers gc.get_referents ctypes.dlopen ctypes.dlsym
    ctypes.cdata""".split()
)
FRAMES = frozenset("tb_frame gi_frame cr_frame ag_frame".split())
GO_BETWEENS = ("inspect", "threading", "ctypes")
"""Modules that ask for their caller."""
WALKS = ("walk_tb", "walk_stack")
"""Generators of `traceback` that give frames to their caller."""


class Refused(KnownFailure):
    reason = Reason.FORBIDDEN_CALL


def refuse(path: str) -> list[str]:
    """Raise Refused from now on where code of `path`, or of a string, asks for one of these.
    Returns a growing list of requests.
    """
    asked: list[str] = []
    files = (os.path.abspath(path), "<string>")

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "object.__getattr__" and args[1] in FRAMES:
            what = f"reads {args[1]}"
        elif event in EVENTS:
            what = f"calls {event}"
        else:
            return
        if event == "sys._getframe" and getattr(args[0], "f_code", None) is own:
            return  # it is this hook that asks
        frame = sys._getframe(0)
        while (above := frame.f_back) and (
            above.f_globals.get("__name__") in GO_BETWEENS or above.f_code.co_name in WALKS
        ):
            frame = above
        if above is None or above.f_code.co_filename in files:
            asked.append(what)
            raise Refused(f"the module {what}")

    own = hook.__code__
    sys.addaudithook(hook)
    return asked
