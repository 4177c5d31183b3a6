"""Does a Ray cluster answer at an address? Asked before Ray is, which tries an address where none answers for minutes.

Guarantees: an answer within `ANSWER_S`, also where something else listens there, nobody answers, or `auto` finds the notes of a cluster
that is gone. Does not say whether the cluster has a node on this machine, or room: `ray.init` and the pool do.
"""

from __future__ import annotations

import os

from kernels_eval.errors import UsageError

ANSWER_S = 10.0
FIX = (
    "start a cluster with `ray start --head` and give the HOST:PORT that it prints, or auto on one of its nodes; without an address, and"
    " without $RAY_ADDRESS, Ray is started here"
)
QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What every Ray process asks a head node first. No other server, and no other process of Ray, can answer it."""


def require_cluster(address: str) -> None:
    """Raises UsageError where no head node of a Ray cluster answers at `address` (`auto`, or HOST:PORT)."""
    if "://" in address:
        raise UsageError(
            f"{address} is an address for Ray Client, which cannot be used: what hands out the work must be part of the cluster",
            "run this on a node of the cluster, with the address auto or the HOST:PORT that `ray start --head` printed",
        )
    from ray._private.services import canonicalize_bootstrap_address

    try:
        head = canonicalize_bootstrap_address(address)  # as Ray does: `auto` is $RAY_ADDRESS, a head node here, or the last one noted here
    except (ConnectionError, ValueError, OSError) as error:
        raise UsageError(f"no Ray cluster is found by the address {address}: {error}", FIX) from error
    if head is None or os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):  # a head node that asks for certificates is left to Ray
        return
    if fault := _fault(head):
        where = address if address == head else f"{address}, which is {head}"
        raise UsageError(f"no Ray cluster answers at {where}: {fault}", FIX)


def _fault(head: str) -> str:
    """Why HOST:PORT is no head node, in a few words. Empty where it is one."""
    import grpc

    with grpc.insecure_channel(head, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(QUESTION)(b"", timeout=ANSWER_S)
        except grpc.RpcError as error:
            code, detail = error.code(), (error.details() or "").splitlines()
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"nothing comes back within {ANSWER_S:.0f} s"
            if code == grpc.StatusCode.UNIMPLEMENTED:
                return "what answers there is no head node"
            if code == grpc.StatusCode.UNAVAILABLE:
                return detail[0].rpartition("last error: ")[2][-200:] if detail else "nothing answers"
        return ""  # an answer; or a refusal of another kind (a token that is asked for, say), which Ray explains better
