"""Joins and leaves Ray clusters, and refuses nodes with other code, torch or build cache
(`require_alike`). Takes the GPUs of one node to be alike."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.devices import Conditions, conditions, gpu_arch, visible_gpus
from kernels_eval.errors import ClusterError, EvalError, UsageError
from kernels_eval.pool.local import FailedError, LostError
from kernels_eval.records import Language, stable_hash
from kernels_eval.sandbox import reaper
from kernels_eval.toolchain import default_cache

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
GPU_TYPE = "accelerator_type:"
ATTEMPTS = 5
"""Starts of Ray on a busy machine."""
WATCH_S = 10.0
"""Seconds between looks at this process's node: a lost one never answers."""
LOST = (
    "RayActorError",
    "NodeDiedError",
    "ObjectLostError",
    "WorkerCrashedError",
    "OutOfMemoryError",
)
QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What every Ray process asks a head node first; only a head node can answer."""


NICENESS = "RAY_worker_niceness", "0"
"""Ray's own is 15: of a busy machine, workers that time get little, and builders next to
nothing."""

_leaving = threading.Lock()


def address_of(given: str | None) -> str:
    """The cluster to use: the one given, else $RAY_ADDRESS, else `local` (start Ray here)."""
    return given or os.environ.get("RAY_ADDRESS") or "local"


def require_cluster(given: str | None) -> None:
    """Raise UsageError where `address_of` names a cluster (`auto` or HOST:PORT), and no Ray head
    node answers there.
    """
    address = address_of(given)
    if address == "local":
        return
    if "://" in address:
        raise UsageError(
            f"{address} is an address for Ray Client, which cannot be used: the process that hands"
            " out the work must be part of the cluster",
            "run this on a node of the cluster, with the address auto or the HOST:PORT that `ray"
            " start --head` printed",
        )
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray._private.services import canonicalize_bootstrap_address

    try:
        # As Ray does: `auto` is $RAY_ADDRESS, a head node here, or the last one noted here.
        head = canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError, OSError) as error:
        raise UsageError(f"no Ray cluster is found at {address}: {error}", FIX) from error
    if head is None:
        return
    if address == "auto":  # as Ray does: a token is sent unasked only to a cluster of this machine
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if found := _fault(head):
        fault, fix = found
        where = address if address == head else f"{address}, which is {head}"
        raise UsageError(f"no Ray cluster can be joined at {where}: {fault}", fix)


def _fault(head: str) -> tuple[str, str] | None:
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
        detail = (error.details() or "nothing answers").splitlines()[0]
        return {
            "DEADLINE_EXCEEDED": (f"no answer within {ANSWER_S:.0f} s", FIX),
            "UNIMPLEMENTED": ("the server that answers there is not a head node", FIX),
            "UNAUTHENTICATED": ("it requires a token, and got none or a wrong one", TOKEN_FIX),
            "UNAVAILABLE": (detail.rpartition("last error: ")[2][-200:], FIX),
        }.get(error.code().name)
    return None  # an answer, or a refusal that Ray explains better


def start_ray(address: str | None = None) -> None:
    """Connect to a cluster (`address`, else `$RAY_ADDRESS`), or start one that ends with this
    process, unless Ray runs. Raises UsageError without an answer, ClusterError.
    """
    # Ray's coming default: actors without a GPU keep CUDA_VISIBLE_DEVICES as it is.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault(*NICENESS)
    import ray

    if ray.is_initialized():
        return
    # Without an address Ray looks for the last `ray start`, whether it lives or not.
    address = address_of(address)
    if address != "local":
        require_cluster(address)
    try:
        if address == "local":
            reaper.watch_ray()
        _init(address)
    except Exception as error:  # a bare Exception where one of its servers did not start in time
        where, hint = (
            ("here", "see /tmp/ray/session_latest/logs; on a busy machine, try again")
            if address == "local"
            else (
                f"at {address}",
                "is this machine a node of that cluster? `ray start --address=HOST:PORT` makes it"
                " one",
            )
        )
        raise ClusterError(f"Ray did not start {where}: {error}", hint) from error


def _init(address: str) -> None:
    """`ray.init`, again where one of its servers did not start within Ray's 30 s."""
    import ray

    # it warns of a Ray that ends with this process
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    for attempts_left in reversed(range(ATTEMPTS if address == "local" else 1)):
        try:
            with keeping_sigterm():
                ray.init(
                    address=address,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            return
        except Exception as error:
            if not attempts_left or "timed out" not in str(error):
                raise
            ray.shutdown()


def is_lost(error: BaseException) -> bool:
    """Whether an error says that the cluster is gone, not that a worker's code failed."""
    if isinstance(error, ClusterError):
        return True
    if "ray" not in sys.modules:
        return False
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def is_needed(address: str | None, language: Language, workers: int | None) -> bool:
    """Whether work on these devices needs Ray: a cluster is named or joined, or there are several
    GPUs. Else processes of this machine do it."""
    ray = sys.modules.get("ray")
    if address_of(address) != "local" or (ray and ray.is_initialized()):
        return True
    return language.needs_gpu and max(len(visible_gpus()), workers or 1) > 1


def membership() -> str:
    """This process's id in the cluster it has joined, or ""."""
    ray = sys.modules.get("ray")
    joined = ray and ray.is_initialized()
    return str(ray.get_runtime_context().get_worker_id()) if ray and joined else ""


def leave(joined: str) -> None:
    """Leave the cluster of this id, unless a new one was joined: the connection to a restarted head
    never answers.
    """
    import ray

    with _leaving:
        if joined and membership() == joined:
            with suppress(Exception):  # the cluster may be gone already
                ray.shutdown()


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler that `ray.init` replaces: a cancelled run must notice it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def interruptible() -> Iterator[None]:
    """Re-raise what a signal handler raised while Ray waited; Ray hides it in a SystemError."""
    try:
        yield
    except SystemError as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, BaseException) and not isinstance(cause, Exception):
            raise cause from None
        raise


class Place(NamedTuple):
    """A process's node, and what it would verify with."""

    node: str
    cache: str
    code: str
    torch: str
    device: str = ""
    """Ray's ids of its GPUs, on that node"""


def place(_: object = None) -> Place:
    """The Place of this process in a running Ray. Ray passes an actor, which is ignored."""
    import ray

    home = Path(__file__).parents[1]
    files = ((file.relative_to(home), file.read_text()) for file in sorted(home.rglob("*.py")))
    code = stable_hash([[path.as_posix(), text] for path, text in files])
    here = ray.get_runtime_context()
    gpus = ",".join(here.get_accelerator_ids().get("GPU", ()))
    return Place(here.get_node_id(), str(default_cache()), code, version("torch"), gpus)


def require_alike(here: Place, there: Place) -> None:
    """Raise UsageError where a worker on another node would not reach the driver's verdicts."""
    if there.node == here.node:
        return  # the same files
    differences = {
        "code": (
            "has another version of kernels_eval than this one",
            "install the same version of concur on every node",
        ),
        "torch": (
            f"has torch {there.torch}, this one {here.torch}",
            "install the same version of torch on every node",
        ),
        "cache": (
            f"keeps builds in {there.cache}, this one in {here.cache}",
            "set CONCUR_CACHE to one path before `ray start` on every node, and here: a folder that"
            " all share, or each node's own disk",
        ),
    }
    for name, (difference, fix) in differences.items():
        if getattr(there, name) != getattr(here, name):
            raise UsageError(f"node {there.node[:8]} of the cluster {difference}", fix)


class Cluster:
    """The workers of the Ray cluster that this process has joined, as actors. Has the methods of
    `kernels_eval.pool.local.Machine`."""

    logs = "see the Ray logs of this node"

    def __init__(self) -> None:
        import ray

        resources: dict[str, float] = ray.cluster_resources()
        self.cpus, self.gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
        self._watched = 0.0

    def start(self, kind: type, given: Sequence[Any], **options: object) -> Any:
        import ray

        return ray.remote(kind).options(**options).remote(*given)

    def started(self, worker: Any) -> Any:
        """Answers the worker's Place once it is made."""
        return worker.__ray_call__.remote(place)

    def call(self, worker: Any, method: str, *given: Any) -> Any:
        return getattr(worker, method).remote(*given)

    def first_of(self, pending: Sequence[Any], timeout_s: float) -> Any:
        import ray

        with interruptible():
            done = ray.wait(list(pending), timeout=timeout_s)[0]
        return done[0] if done else None

    def get(self, pending: Any) -> Any:
        """The answer of one that is done. Raises LostError or FailedError."""
        import ray
        from ray import exceptions

        try:
            with interruptible():
                return ray.get(pending)
        except exceptions.RayTaskError as error:
            raise FailedError(error.cause) from error.as_instanceof_cause()
        except tuple(getattr(exceptions, name) for name in LOST) as error:
            raise LostError(str(error)) from error

    def kill(self, worker: Any) -> None:
        import ray

        ray.kill(worker)

    def require_node(self) -> None:
        """Raise ClusterError where Ray has lost this process's node; asked each `WATCH_S`."""
        import ray

        if time.monotonic() < self._watched + WATCH_S:
            return
        self._watched = time.monotonic()
        here = ray.get_runtime_context().get_node_id()
        if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == here):
            raise ClusterError(
                "Ray has lost the node that this process is on (was its raylet killed?)",
                "verified candidates are kept; rerun the same command to resume",
            )

    def is_full(self, kind: str, share: float) -> bool:
        """Whether the cluster has devices of a `kind` (CPU, GPU), and others use them all."""
        import ray

        there: dict[str, float] = ray.cluster_resources()
        free: dict[str, float] = ray.available_resources()
        return there.get(kind, 0.0) >= share > free.get(kind, 0.0)


def gpu_types() -> dict[str, int]:
    """GPUs in the cluster by Ray's type name (H100)."""
    import ray

    found = Counter[str]()
    for held in (node["Resources"] for node in ray.nodes() if node["Alive"]):
        for name in held:
            if name.startswith(GPU_TYPE) and held.get("GPU"):
                found[name.removeprefix(GPU_TYPE)] += int(held["GPU"])
    return dict(found)


def gpu_type_for(asked: str | None) -> str | None:
    """The workers' GPU type: the one asked for, this node's among several, or None for any. Raises
    UsageError.
    """
    import ray

    there = gpu_types()
    if asked is None and len(there) < 2:
        return None
    here = ray.get_runtime_context().get_node_id()
    own = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    wanted = [asked] if asked else [n for n in there for each in own if GPU_TYPE + n in each]
    if not wanted or wanted[0] not in there:
        named = ", ".join(f"{name} ({count})" for name, count in sorted(there.items())) or "none"
        which = f"no GPU of the type {asked}" if asked else "GPUs of several types, this node none"
        raise UsageError(
            f"the cluster has {which}: {named}",
            "choose one with --gpu-type, or verification.gpu_type in a profile",
        )
    return wanted[0]


def measured_on(gpu_type: str, language: Language) -> tuple[Conditions, str | None]:
    """Conditions and compute capability of a node with this GPU type. Raises DeviceError."""
    import ray

    asked = ray.remote(_conditions_and_arch).options(num_cpus=0, accelerator_type=gpu_type)
    try:
        found: tuple[Conditions, str | None] = ray.get(asked.remote(language))
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, EvalError) else error from error
    return found


def _conditions_and_arch(language: Language) -> tuple[Conditions, str | None]:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # empty for a task that holds no GPU
    return conditions(language), gpu_arch()


def shortage(
    wanted: int, kind: str, waited_s: float, gpu_type: str | None = None
) -> tuple[int, str]:
    """How many devices (Ray's `kind`) the cluster lacks for `wanted` workers, and a warning."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if gpu_type:
        nodes = [node for node in nodes if GPU_TYPE + gpu_type in node["Resources"]]
    there = sum(node["Resources"].get(kind, 0) for node in nodes)
    short = max(0, wanted - int(there))
    return short, (
        f"{short} of {wanted} workers have had no device for {waited_s:.0f} s: the Ray cluster has"
        f" {there:g} {kind}s on {len(nodes)} node{'s' * (len(nodes) != 1)} (a node is missing or"
        " was lost); the run continues with the others"
    )
