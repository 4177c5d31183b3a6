"""The kernel launches that candidates' libraries made in this process: a thin wrapper of
libconcur_launch.so.

Guarantees: counts cover every launch that a library built by `Builder` made through nvcc's launch
syntax since the last reset. Does not guarantee more than the process itself is worth: native code
beside the counters can change them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_char_p, c_double, c_int, c_long, c_void_p, create_string_buffer

LIBRARY = "libconcur_launch.so"
Call = Callable[..., float]


class Launches:
    """Counters of the library with that name that is loaded in this process."""

    def __init__(self, library: CDLL) -> None:
        def function(name: str, result: type[c_long | c_double] | None, *arguments: type) -> Call:
            found = library[f"concur_launch_{name}"]
            found.restype, found.argtypes = result, arguments
            return found

        self.reset = function("reset", None)
        """Forget counts and times; mode and expected stream stay."""
        self.expect_stream = function("expect_stream", None, c_void_p)
        """Count launches on any other stream than this cudaStream_t (0: the default stream) as off
        stream."""
        self.elapsed_ms = function("ms", c_double)
        """Milliseconds spent in timed launches since the reset; waits for them."""
        self._mode = function("mode", None, c_int, c_int)
        self._wanted = False, False
        self._total, self._off_stream = function("total", c_long), function("off_stream", c_long)
        self._names = function("names", c_long, c_char_p, c_long)

    @classmethod
    def find(cls) -> Launches | None:
        """The counters of this process; None where no CUDA library of a candidate is loaded."""
        try:
            return cls(CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
        except OSError:
            return None

    def mode(self, *, null: bool = False, timed: bool = False) -> None:
        """`null`: count launches without making them. `timed`: put each between two CUDA events."""
        self._wanted = null, timed
        self._mode(null, timed)

    def pause(self, on: bool) -> None:
        """Meanwhile, make launches although they are to be counted only."""
        null, timed = self._wanted
        if null:
            self._mode(not on, timed)

    @contextmanager
    def nulled(self) -> Iterator[None]:
        """Meanwhile, count launches without making them."""
        self.mode(null=True)
        try:
            yield
        finally:
            self.mode()

    @property
    def total(self) -> int:
        return int(self._total())

    @property
    def off_stream(self) -> int:
        return int(self._off_stream())

    def names(self) -> dict[str, int]:
        """Launches of each kernel, by its readable name."""
        needed = int(self._names(None, 0))
        buffer = create_string_buffer(needed)
        self._names(buffer, needed)
        lines = buffer.value.decode(errors="replace").splitlines()
        found = (line.rpartition("\t") for line in lines)
        return {name: int(count) for name, _, count in found}
