"""What the commands do with a stack: start it, look at it, stop it, and point a run at it.

Guarantees: `up` checks everything before it starts anything, starts nothing twice, and where a
start does not succeed leaves nothing running; `down` stops what `up` started, also after the
manager was killed, within `STOP_S` seconds: flow runs first, which have `RUNS_GRACE_S` to write
what they have and to say how they ended while the servers still answer; one command at a time
changes a stack.
"""

from __future__ import annotations

import os
import re
import secrets as random
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from flows.ops.health import fault, mlflow_page
from flows.ops.manager import GRACE_S, Manager, configuration, start_manager
from flows.ops.places import Places, StackState
from flows.ops.preflight import check, require_place
from flows.ops.programs import TABLE, Stack, client_environment, client_secrets
from flows.ops.runs import STOPPED, flow_runs, settle
from flows.ops.settings import (
    MLFLOW_SECRET,
    PARTS,
    PREFECT_SECRET,
    Part,
    Secrets,
    StackSettings,
    load_secrets,
    load_settings,
)
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Json, Row
from kernels_eval.sandbox.process_tree import Identity, alive, descendants, send, wait_gone
from tasks.files import atomic_write

START_S = 300.0
LOOK_S = 0.5
RUNS_GRACE_S = 18.0
"""A run that is told to stop needs 15 s at most (flows.runtime.shutdown), and then reports."""
KILL_S = 5.0
STOP_S = 70.0
"""The runs' grace, that of each part in turn, and the last kills."""
TAIL_LINES = 12
Say = Callable[[str], None]
ADDRESSES: dict[Part, str] = {
    "prefect": "PREFECT_API_URL",
    "mlflow": "MLFLOW_TRACKING_URI",
    "ray": "RAY_ADDRESS",
}
OWN_CHOICE = {
    "PREFECT_": ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE"),
    "RAY_": ("RAY_ADDRESS",),
}
"""Variables that, where the caller has set one, keep a process away from that part of a stack."""


def _silent(line: str) -> None:
    pass


# -- start -----------------------------------------------------------------------------------------


def up(
    root: str,
    options: Row,
    *,
    file: str | None = None,
    timeout_s: float = START_S,
    foreground: bool = False,
    tell: Say = _silent,
) -> Json:
    """Start a stack, or what has failed of one that runs, and wait until all of it is healthy.
    Returns what `status` does.

    In the foreground it returns only when the stack has been stopped. Raises UsageError for what
    must be corrected first, EvalError where a part does not become healthy within `timeout_s`.
    """
    places = Places(root)
    settings, given = load_settings(file, options)
    load_secrets(settings)  # refuses an open server before anything is made
    places.require_owner()
    require_place(places)
    with places.changing():
        before = places.read_state()
        if before is not None and before.running:
            if foreground:
                raise UsageError(
                    f"a stack is already running for {places.root}", "`concur down` stops it"
                )
            _restart_failed(places, before, given, tell)
            _wait_healthy(places, timeout_s, tell)
            return status(root)
        _end_servers(places, keep_runs=before is not None)
        stack = Stack(places, settings, load_secrets(settings))
        check(stack)
        stop = _stop_requested() if foreground else None
        manager = _start(stack)
        if stop is None:
            tell(f"starting: {', '.join(settings.parts)}")
            try:
                _wait_healthy(places, timeout_s, tell)
            except BaseException:
                _stop(places, tell)
                raise
            return status(root)
    _stay(places, manager, stop)
    return {"healthy": False, "parts": []}


def _restart_failed(places: Places, before: StackState, given: Row, tell: Say) -> None:
    """Start again what the manager has given up. Raises UsageError where other settings are asked
    for than the stack was started with."""
    running = before.settings.model_dump()
    asked = StackSettings.model_validate({**running, **given}).model_dump()
    for name in given:
        if asked[name] != running[name]:
            raise UsageError(
                f"a stack is already running for {places.root}, with {name} {running[name]} instead"
                f" of {asked[name]}",
                "`concur down` first",
            )
    secrets = load_secrets(before.settings)
    if before.authenticated and not (secrets.prefect or secrets.mlflow):
        raise UsageError(
            f"the stack of {places.root} asks for passwords",
            f"set {PREFECT_SECRET} and {MLFLOW_SECRET} as it was started with",
        )
    manager = Manager(places)
    processes = manager.processes()
    failed = [part for part, process in processes.items() if process["statename"] == "FATAL"]
    tell(f"already running: {', '.join(sorted(processes.keys() - failed)) or 'none'}")
    for part in failed:
        manager.ask("startProcess", part, False)


def _start(stack: Stack) -> Identity:
    """Write what the manager and its parts read, and start it."""
    places, settings, secrets = stack.places, stack.settings, stack.secrets
    places.make_temporary()
    for part in settings.parts:
        places.starts(part).unlink(missing_ok=True)
    if "ray" in settings.parts:
        atomic_write(places.ray_token, random.token_hex(32), mode=0o600)
    if secrets.mlflow:
        atomic_write(places.mlflow_auth, stack.filled(TABLE["mlflow_auth"]), mode=0o600)
    atomic_write(places.configuration, configuration(places, settings.parts), mode=0o600)
    identity, process = start_manager(places)
    authenticated = bool(secrets.prefect or secrets.mlflow)
    state = StackState(settings=settings, authenticated=authenticated, manager=identity)
    places.write_state(state)
    if process.stdin:
        process.stdin.close()  # the manager waits for the state
    return identity


def _wait_healthy(places: Places, timeout_s: float, tell: Say) -> None:
    deadline = time.monotonic() + timeout_s
    told: set[str] = set()
    while True:
        found = status(str(places.root))
        for row in found["parts"]:
            if row["health"] == "healthy" and row["part"] not in told:
                told.add(row["part"])
                tell(f"healthy: {row['part']} ({row['uptime_s']:.0f} s after its start)")
            if row["health"] == "failed":
                raise EvalError(
                    f"{row['part']} does not start: {row['reason']}{tail(places, row['part'])}",
                    f"its log is {row['log']}",
                )
        if found["healthy"]:
            return
        if not found["running"]:
            raise EvalError(
                f"the process manager ended{tail(places, 'supervisor')}",
                f"its log is {places.log('supervisor')}",
            )
        if time.monotonic() > deadline:
            slow = [f"{row['part']} ({row['reason']})" for row in found["parts"] if row["reason"]]
            raise EvalError(
                f"not healthy within {timeout_s:.0f} s: {', '.join(slow)}",
                f"see {places.logs}, or raise --timeout",
            )
        time.sleep(LOOK_S)


def tail(places: Places, name: str) -> str:
    """The end of a log, on lines of its own."""
    try:
        with places.log(name).open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - 8000))
            lines = handle.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n" + "\n".join(f"  | {line[:200]}" for line in lines[-TAIL_LINES:]) + "\n"


# -- in the foreground -----------------------------------------------------------------------------


def _stop_requested() -> threading.Event:
    """Set by SIGTERM and Ctrl-C."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _stay(places: Places, manager: Identity, stop: threading.Event) -> None:
    """Tell systemd when all is healthy, and stop the stack when told to. Raises EvalError where the
    manager ends by itself or something cannot be stopped."""
    ready = False
    while not stop.wait(1.0):
        if not alive(manager):
            # `concur down` holds the lock until the state is gone.
            with suppress(UsageError), places.changing():
                if places.read_state() is None:
                    return
                raise EvalError(f"the process manager ended{tail(places, 'supervisor')}")
        elif not ready and status(str(places.root))["healthy"]:
            ready = True
            notify("READY=1")
    notify("STOPPING=1")
    with places.changing():
        _require_none(_stop(places, lambda line: print(line, flush=True)))


def notify(message: str) -> None:
    """Tell systemd, where it asked to be told."""
    place = os.environ.get("NOTIFY_SOCKET")
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.connect("\0" + place[1:] if place.startswith("@") else place)
            told.send(message.encode())


# -- stop ------------------------------------------------------------------------------------------


def down(root: str, tell: Say = _silent) -> Json:
    """Stop a stack and everything that runs below it, within `STOP_S` seconds. Raises EvalError
    where something cannot be stopped."""
    places = Places(root)
    began = time.monotonic()
    if not places.stack.is_dir():
        return {"stopped": [], "seconds": 0.0}
    places.require_owner(0)
    try:
        with places.changing():
            found = places.processes()
            processes = Manager(places).processes()
            stopped = [part for part in PARTS if part in processes and processes[part]["pid"]]
            if found:
                tell(f"stopping {', '.join(reversed(stopped)) or f'{len(found)} processes'}")
            _require_none(_stop(places, tell))
    except PermissionError as error:
        raise UsageError(
            f"cannot read {places.stack}: {error.strerror}",
            "run the command as the user who started it",
        ) from error
    seconds = round(time.monotonic() - began, 1)
    return {"stopped": stopped, "processes": len(found), "seconds": seconds}


def _require_none(left: list[Identity]) -> None:
    if left:
        raise EvalError(
            f"processes that could not be stopped: {', '.join(str(one.pid) for one in left)}",
            "run it as the user who started them",
        )


def _stop(places: Places, tell: Say) -> list[Identity]:
    """Returns what could not be stopped."""
    stack, state = _stack_of(places)
    found = places.processes()
    runs = flow_runs(found)
    manager = Manager(places)
    manager.ask("stopProcess", "worker")  # returns when it has ended: no further run starts
    if runs:
        tell(f"stopping {len(runs)} flow run{'s' if len(runs) > 1 else ''}")
        processes = [one for those in runs.values() for one in those]
        for one in processes:
            send(one, signal.SIGTERM)
        _kill(wait_gone(processes, RUNS_GRACE_S))
    if stack and state:
        for name in settle(stack, STOPPED, runs):
            tell(f"flow run {name}: ended in Prefect, because {STOPPED}")
        manager.ask("shutdown")
        wait_gone([state.manager], GRACE_S * len(state.settings.parts))
        if not state.running:
            wait_gone(_servers(places), GRACE_S)
    deadline = time.monotonic() + KILL_S
    left = [one for one in {*found, *places.processes()} if alive(one)]
    while left and time.monotonic() < deadline:
        _kill(left)
        left = places.processes()  # one that was killed may just have started another
    if not left:
        places.clean()
    return left


def _end_servers(places: Places, keep_runs: bool) -> None:
    """End what a manager that was killed has left. Flow runs are kept: they wait for the servers,
    and go on."""
    servers = _servers(places) if keep_runs else places.processes()
    for one in servers:
        send(one, signal.SIGTERM)
    _kill(wait_gone(servers, GRACE_S))


def _servers(places: Places) -> list[Identity]:
    """All processes of the stack but its flow runs and what is below those."""
    found = places.processes()
    leaders = {one.pid for those in flow_runs(found).values() for one in those}
    runs = leaders | {pid for leader in leaders for pid in descendants(leader)}
    return [one for one in found if one.pid not in runs]


def _kill(processes: list[Identity]) -> None:
    for one in processes:
        send(one, signal.SIGKILL)
    wait_gone(processes, KILL_S)


# -- look ------------------------------------------------------------------------------------------


def status(root: str) -> Json:
    """Each part as it is now: asked at its endpoint, not read from a file. Plain data; `healthy`
    only where all of it is."""
    places = Places(root)
    stack, state = _stack_of(places)
    found: Json = {"root": str(places.root), "running": False, "healthy": False}
    if stack is None or state is None:
        return found | {"supervisor": None, "parts": []}
    processes = Manager(places).processes()
    with ThreadPoolExecutor(len(state.settings.parts)) as pool:
        parts = list(
            pool.map(lambda part: _row(stack, part, processes.get(part)), state.settings.parts)
        )
    return found | {
        "running": state.running,
        "supervisor": state.manager.pid if state.running else None,
        "healthy": state.running and all(row["health"] == "healthy" for row in parts),
        "parts": parts,
    }


def _row(stack: Stack, part: Part, process: Row | None) -> Json:
    pid = process["pid"] or None if process else None
    if process is None:
        health, reason = "stopped", "not running"
    elif pid is None:
        health = "failed" if process["statename"] == "FATAL" else "restarting"
        reason = _last_end(stack.places, part) or process["spawnerr"] or "not running"
    else:
        reason = fault(part, stack, process["start"])
        slow = "starting" if process["statename"] == "STARTING" else "unhealthy"
        health = slow if reason else "healthy"
    starts, url = stack.places.starts(part), stack.url(part)
    page = url
    if part == "mlflow":
        page = mlflow_page(url, stack.filled(TABLE[part]["health"]["login"]))
    return {
        "part": part,
        "health": health,
        "reason": reason,
        "pid": pid,
        "port": stack.settings.ports()[f"{part}_port"],
        "url": url,
        "page": f"{url}/view/index.html" if part == "pages" else page,
        "restarts": max(0, starts.stat().st_size - 1) if starts.exists() else 0,
        "processes": 1 + len(descendants(pid)) if pid else 0,
        "uptime_s": round(time.time() - process["start"], 1) if process and pid else None,
        "log": str(stack.places.log(part)),
    }


def _last_end(places: Places, part: str) -> str:
    """How the last process of a part ended, such as "exit status 1", by the manager's log."""
    try:
        text = places.log("supervisor").read_text(errors="replace")
    except OSError:
        return ""
    ends: list[str] = re.findall(rf"exited: {part} \((.*?);", text)
    return ends[-1] if ends else ""


def _stack_of(places: Places) -> tuple[Stack, StackState] | tuple[None, None]:
    """The stack that was started, with the secrets that this process knows: whoever only looks need
    not know them."""
    state = places.read_state()
    if state is None:
        return None, None
    try:
        secrets = load_secrets(state.settings)
    except UsageError:
        secrets = Secrets()
    return Stack(places, state.settings, secrets), state


# -- use -------------------------------------------------------------------------------------------


def export_lines(root: str) -> list[str]:
    """Lines for a shell that point it at the stack; secrets by the name of the variable that holds
    them. Raises UsageError without one."""
    stack, state = _stack_of(Places(root))
    if stack is None or state is None:
        raise UsageError(
            f"no stack is running for {Places(root).root}",
            f"start one with `concur up --root {shlex.quote(root)}`",
        )
    lines = [
        f"export {name}={shlex.quote(value)}" for name, value in client_environment(stack).items()
    ]
    if state.authenticated:
        secrets = client_secrets(stack.settings)
        lines += [f'export {name}="${source}"' for name, source in secrets.items()]
        if "mlflow" in stack.settings.parts:
            lines.append('export MLFLOW_TRACKING_USERNAME="${MLFLOW_AUTH_ADMIN_USERNAME:-admin}"')
    return lines


def use_stack(root: str, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Point this process at the stack of `root`, where one runs; variables that are set already
    win. Returns what is used, in words. Raises UsageError where a part of it is not healthy."""
    if "://" in root:
        return []
    stack, state = _stack_of(Places(root))
    if stack is None or state is None or not state.running:
        return []
    wanted = client_environment(stack)
    for prefix, chosen in OWN_CHOICE.items():
        if any(name in environment for name in chosen):
            wanted = {name: value for name, value in wanted.items() if not name.startswith(prefix)}
    if state.authenticated:
        given = {name: environment.get(of) for name, of in client_secrets(stack.settings).items()}
        wanted |= {name: value for name, value in given.items() if value is not None}
        wanted["MLFLOW_TRACKING_USERNAME"] = stack.secrets.mlflow_user
    joined = [part for part, name in ADDRESSES.items() if name in wanted.keys() - environment]
    for name, value in wanted.items():
        environment.setdefault(name, value)
    used = []
    for part in joined:  # to ask Ray imports it, and on import it reads where it may listen
        if problem := fault(part, stack):
            raise UsageError(
                f"the stack of {stack.places.root} has no healthy {part}: {problem}",
                "`concur status` shows it; `concur down` stops it",
            )
        used.append(f"{part} {wanted[ADDRESSES[part]].removesuffix('/api')}")
    return used


def join_stack(root: str) -> None:
    """Use the stack of `root` in this process where one runs, and say so.

    To be called before prefect is imported. Raises UsageError where a part of it is not healthy: a
    run that went elsewhere would not be seen where it is looked for.
    """
    if used := use_stack(root):
        line = f"uses the stack of {Places(root).root}: {', '.join(used)}"
        print(line, file=sys.stderr, flush=True)
