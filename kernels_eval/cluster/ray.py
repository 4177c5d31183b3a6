"""Does a Ray cluster answer at an address, and are its nodes alike?

Ray itself tries an address where nothing answers for minutes. Guarantees: an answer within
`ANSWER_S`, also where something else listens there, nobody answers, the token is not the cluster's,
or `auto` finds the notes of a cluster that is gone; no verdict from a node with other code, another
torch, or a build cache elsewhere (`require_alike`). Does not say whether the cluster has a node on
this machine, or
room: `ray.init` and the pool do. Does not compare devices.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash

ANSWER_S = 10.0
FIX = (
    "start a cluster with `ray start --head` and give the HOST:PORT that it prints, or auto on one"
    " of its nodes; without an address, and without $RAY_ADDRESS, Ray is started here"
)
TOKEN_FIX = (
    "give every node, and this one, RAY_AUTH_MODE=token and the head node's token (`ray"
    " get-auth-token` shows it) in RAY_AUTH_TOKEN or in ~/.ray/auth_token; or, in a network that"
    " nobody else reaches, start all nodes with RAY_AUTH_MODE=disabled"
)
QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What every Ray process asks a head node first. No other server, and no other process of Ray, can
answer it."""


def address_of(given: str | None) -> str:
    """The cluster that is meant: the one given, else $RAY_ADDRESS, else `local`, which is none: Ray
    is started here."""
    return given or os.environ.get("RAY_ADDRESS") or "local"


def require_cluster(address: str) -> None:
    """Raises UsageError where no head node of a Ray cluster answers at `address` (`auto`, or
    HOST:PORT)."""
    if "://" in address:
        raise UsageError(
            f"{address} is an address for Ray Client, which cannot be used: what hands out the work"
            " must be part of the cluster",
            "run this on a node of the cluster, with the address auto or the HOST:PORT that `ray"
            " start --head` printed",
        )
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray._private.services import canonicalize_bootstrap_address

    try:
        head = canonicalize_bootstrap_address(
            address
        )  # as Ray does: `auto` is $RAY_ADDRESS, a head node here, or the last one noted here
    except (ConnectionError, ValueError, OSError) as error:
        raise UsageError(
            f"no Ray cluster is found by the address {address}: {error}", FIX
        ) from error
    if head is None:
        return
    if address == "auto":  # as Ray does: a token is shown unasked to a cluster of this machine only
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if found := _fault(head):
        fault, fix = found
        where = address if address == head else f"{address}, which is {head}"
        raise UsageError(f"no Ray cluster can be joined at {where}: {fault}", fix)


def _fault(head: str) -> tuple[str, str] | None:
    """Why the head node at HOST:PORT cannot be joined, and what would mend it. None where it
    can."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.exceptions import AuthenticationError

    try:
        # with Ray's own certificates and token, where it is told to use them
        with init_grpc_channel(head, options=[("grpc.enable_http_proxy", 0)]) as channel:
            channel.unary_unary(QUESTION)(b"", timeout=ANSWER_S)
    except AuthenticationError as error:
        return str(error).splitlines()[0], TOKEN_FIX
    except grpc.RpcError as error:
        code, detail = error.code(), (error.details() or "nothing answers").splitlines()[0]
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"nothing comes back within {ANSWER_S:.0f} s", FIX
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return "what answers there is no head node", FIX
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return "it asks for a token, and gets none or another", TOKEN_FIX
        if code == grpc.StatusCode.UNAVAILABLE:
            return detail.rpartition("last error: ")[2][-200:], FIX
    return None  # an answer, or a refusal that Ray explains better


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Ray puts a handler of its own in the place of whatever handles SIGTERM: a run that is
    cancelled would not know that it was."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptible() -> Iterator[None]:
    """What a signal's handler raised while Ray waited: Ray's compiled code makes a SystemError of
    it, which nobody would know for the order to stop that it is."""
    try:
        yield
    except SystemError as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, BaseException) and not isinstance(cause, Exception):
            raise cause from None
        raise


class Place(NamedTuple):
    """Where a process is, and what it would verify with."""

    node: str
    cache: str
    code: str
    torch: str


def place(_: object = None) -> Place:
    """Of this process, which is a driver, or a worker, of a Ray that runs. (What is ignored is the
    actor that Ray calls it for.)"""
    import ray

    from kernels_eval.build.toolchain import default_cache

    home = Path(__file__).parents[1]
    code = stable_hash(
        [
            [file.relative_to(home).as_posix(), file.read_text(encoding="utf-8")]
            for file in sorted(home.rglob("*.py"))
        ]
    )
    return Place(
        ray.get_runtime_context().get_node_id(), str(default_cache()), code, version("torch")
    )


def require_alike(here: Place, there: Place) -> None:
    """Raises UsageError where a worker on another node than the driver's would not reach the same
    verdicts."""
    if there.node == here.node:
        return  # the same files
    where = f"node {there.node[:8]} of the cluster"
    if there.code != here.code:
        raise UsageError(
            f"{where} has another version of kernels_eval than this one",
            "install the same version of concur on every node",
        )
    if there.torch != here.torch:
        raise UsageError(
            f"{where} has torch {there.torch}, this one {here.torch}",
            "install the same version of torch on every node",
        )
    if there.cache != here.cache:
        raise UsageError(
            f"{where} keeps builds in {there.cache}, this one in {here.cache}",
            "set CONCUR_CACHE to one path before `ray start` on every node, and here: a folder that"
            " all share, or each node's own disk",
        )


def shortage(wanted: int, kind: str, waited_s: float) -> tuple[int, str]:
    """How many devices (Ray's `kind`: GPU or CPU) the cluster has too few for `wanted` workers, and
    what to say of it."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    there = sum(node["Resources"].get(kind, 0) for node in nodes)
    short = max(0, wanted - int(there))
    return (
        short,
        (
            f"{short} of {wanted} workers have had no device for {waited_s:.0f} s: the Ray cluster"
            f" has {there:g} {kind}s on {len(nodes)} node{'s' * (len(nodes) != 1)} (a node is"
            " missing or was lost); the run goes on with the others"
        ),
    )
