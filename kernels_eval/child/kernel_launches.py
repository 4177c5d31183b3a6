"""What a process knows of the kernel launches that candidates' libraries made: a thin wrapper of
libconcur_launch.so.

Guarantees: counts cover every launch that a library built by `Builder` made through nvcc's launch
syntax since the last reset. Does not guarantee more than the process itself is worth: native code
beside the counters can change them.
"""

from __future__ import annotations

import ctypes
import os

LIBRARY = "libconcur_launch.so"


class Launches:
    """Counters of the library with that name that is loaded in this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.concur_launch_reset.restype = None
        library.concur_launch_mode.argtypes, library.concur_launch_mode.restype = (
            [
                ctypes.c_int,
                ctypes.c_int,
            ],
            None,
        )
        (
            library.concur_launch_expect_stream.argtypes,
            library.concur_launch_expect_stream.restype,
        ) = [ctypes.c_void_p], None
        library.concur_launch_total.restype = library.concur_launch_off_stream.restype = (
            ctypes.c_long
        )
        library.concur_launch_ms.restype = ctypes.c_double
        library.concur_launch_names.argtypes, library.concur_launch_names.restype = (
            [
                ctypes.c_char_p,
                ctypes.c_long,
            ],
            ctypes.c_long,
        )

    @classmethod
    def find(cls) -> Launches | None:
        """The counters of this process; None where no CUDA library of a candidate is loaded."""
        try:
            return cls(ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
        except OSError:
            return None

    def reset(self) -> None:
        """Forget counts and times; mode and expected stream stay."""
        self._library.concur_launch_reset()

    def mode(self, *, null: bool = False, timed: bool = False) -> None:
        """`null`: count launches without making them. `timed`: put each between two CUDA events."""
        self._library.concur_launch_mode(null, timed)

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
        buffer = ctypes.create_string_buffer(needed)
        self._library.concur_launch_names(buffer, needed)
        lines = [
            line.rpartition("\t") for line in buffer.value.decode(errors="replace").splitlines()
        ]
        return {name: int(count) for name, _, count in lines}
