"""What a verification does where its Ray cluster is gone: it leaves it, and joins the one that
comes up in its place.

A head that is started again is another cluster: what was joined before answers nothing, or that one
shows the wrong token, for ever.
Guarantees: a cluster that another thread of this process has joined meanwhile is not left; a head
that is being started is waited for, no other fault is. Does not start a head: who looks after it
does (`concur up`), or a person. Where Ray was started in this process, the pool starts it anew.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kernels_eval.cluster.ray import address_of, require_cluster
from kernels_eval.errors import ClusterError, UsageError

BACK_S = 180.0
"""How long a head may be away: what looks after it starts it again within seconds, and it is up
within one minute on a busy machine."""
ASK_EVERY_S = 1.0
FIX = "`concur status` says whether its head runs again; the same run goes on from what is kept"
_lock = threading.Lock()


def is_lost(error: BaseException) -> bool:
    """Does this error say that the cluster is gone? Not where a worker's own code has failed."""
    if isinstance(error, ClusterError):
        return True
    if "ray" not in sys.modules:
        return False
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def session() -> str:
    """What this process is in the cluster that it has joined; empty where it has joined none."""
    import ray

    return ray.get_runtime_context().get_worker_id() if ray.is_initialized() else ""


def leave(joined: str) -> None:
    """Leave the cluster that was `joined`."""
    import ray

    with _lock:
        if joined and session() == joined:
            with suppress(Exception):  # there may be nothing left that could be told
                ray.shutdown()


def explained(error: BaseException) -> ClusterError:
    """What to raise for an error of Ray's own."""
    said = (str(error).splitlines() or [""])[0].partition(". Ensure that the token")[
        0
    ]  # Ray takes another cluster for a wrong token
    return ClusterError(f"the Ray cluster is lost: {type(error).__name__}: {said}", FIX)


def wait_for_head(address: str | None, tell: Callable[[str], None] = lambda line: None) -> None:
    """Until a cluster answers at the address, where one is named. Raises ClusterError where none
    does within `BACK_S` seconds."""
    where = address_of(address)
    deadline, told = time.monotonic() + BACK_S, False
    while where != "local":
        try:
            return require_cluster(where)
        except UsageError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"no Ray cluster answers at {where}, for {BACK_S:.0f} s: {error.args[0]}", FIX
                ) from error
            if not told:
                tell(f"{error.args[0]}; it is waited for, {BACK_S:.0f} s at most")
                told = True
        time.sleep(ASK_EVERY_S)  # between two questions; what ends the wait is the answer
