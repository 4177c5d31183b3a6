"""The kernel launches that candidates' libraries made in this process: a thin wrapper of
libconcur_launch.so.

Guarantees: counts cover every launch that a library built by `Builder` made through nvcc's launch
syntax since the last reset. Does not guarantee more than the process itself is worth: native code
beside the counters can change them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_char_p, c_double, c_int, c_long, c_void_p, create_string_buffer

LIBRARY = "libconcur_launch.so"


class Launches:
    """Counters of the library with that name that is loaded in this process."""

    def __init__(self, library: CDLL) -> None:
        for name, result, *arguments in (
            ("reset", None),
            ("mode", None, c_int, c_int),
            ("expect_stream", None, c_void_p),
            ("total", c_long),
            ("off_stream", c_long),
            ("ms", c_double),
            ("names", c_long, c_char_p, c_long),
        ):
            function = getattr(library, f"concur_launch_{name}")
            function.restype, function.argtypes = result, arguments
        self._library = library

    @classmethod
    def find(cls) -> Launches | None:
        """The counters of this process; None where no CUDA library of a candidate is loaded."""
        try:
            return cls(CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
        except OSError:
            return None

    def reset(self) -> None:
        """Forget counts and times; mode and expected stream stay."""
        self._library.concur_launch_reset()

    def mode(self, *, null: bool = False, timed: bool = False) -> None:
        """`null`: count launches without making them. `timed`: put each between two CUDA events."""
        self._library.concur_launch_mode(null, timed)

    @contextmanager
    def nulled(self) -> Iterator[None]:
        """Meanwhile, count launches without making them."""
        self.mode(null=True)
        try:
            yield
        finally:
            self.mode()

    def expect_stream(self, stream: int) -> None:
        """Count launches on any other stream than this cudaStream_t (0: the default stream) as off
        stream."""
        self._library.concur_launch_expect_stream(stream)

    @property
    def total(self) -> int:
        return int(self._library.concur_launch_total())

    @property
    def off_stream(self) -> int:
        return int(self._library.concur_launch_off_stream())

    def elapsed_ms(self) -> float:
        """Milliseconds spent in timed launches since the reset; waits for them."""
        return float(self._library.concur_launch_ms())

    def names(self) -> dict[str, int]:
        """Launches of each kernel, by its readable name."""
        needed = self._library.concur_launch_names(None, 0)
        buffer = create_string_buffer(needed)
        self._library.concur_launch_names(buffer, needed)
        lines = buffer.value.decode(errors="replace").splitlines()
        found = (line.rpartition("\t") for line in lines)
        return {name: int(count) for name, _, count in found}
