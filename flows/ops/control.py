"""What the commands do with a stack: start it or what is missing of it, look at it, stop it, and
point a run at it.

Guarantees: `up` checks everything before it starts anything, starts nothing twice, and where a
first start does not succeed leaves nothing running; `down` stops what `up` or a supervisor started,
also after that supervisor was killed; one command at a time changes a stack.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flows.ops.health import fault
from flows.ops.parts import client_environment, programs, secret_names
from flows.ops.places import Places, StackState, changing, read_state
from flows.ops.preflight import check, require_place
from flows.ops.processes import MARK, Identity, alive, members, send, wait_gone
from flows.ops.runs import Runs
from flows.ops.settings import (
    MLFLOW_SECRET,
    PREFECT_SECRET,
    Part,
    Secrets,
    StackSettings,
    load_secrets,
    load_settings,
)
from flows.ops.stopping import STOP_S, stop_parts
from flows.ops.supervisor import Supervisor, clean, prepare, say
from kernels_eval.errors import EvalError, UsageError

START_S = 300.0
LOOK_S = 0.2
TAIL_LINES = 12
Say = Callable[[str], None]


def up(
    root: str,
    options: Mapping[str, Any],
    *,
    file: str | None = None,
    timeout_s: float = START_S,
    foreground: bool = False,
    tell: Say = lambda line: None,
) -> dict[str, Any]:
    """Start a stack, or what is missing of one that runs, and wait until all of it is healthy.
    Returns what `status` does.

    In the foreground it returns only when the stack has been stopped. Raises UsageError for what
    must be mended first, EvalError where a part does not become healthy within `timeout_s`.
    """
    places = Places(root)
    settings, given = load_settings(file, options)
    load_secrets(settings)  # an open server is refused before anything is made
    places.require_owner()
    require_place(places)
    with changing(places):
        before = read_state(places)
        running = before is not None and (alive(before.supervisor) or bool(before.living))
        if before is not None and running:
            settings = _same_settings(places, before, given)
        secrets = load_secrets(settings)
        living = before.living if before is not None else []
        if (
            before is not None
            and running
            and before.authenticated
            and not (secrets.prefect or secrets.mlflow)
        ):
            raise UsageError(
                f"the stack of {places.root} asks for passwords",
                f"set {PREFECT_SECRET} and {MLFLOW_SECRET} as it was started with",
            )
        if before is not None and alive(before.supervisor):
            if foreground:
                raise UsageError(
                    f"a stack runs already for {places.root}", "`concur down` stops it"
                )
            tell(f"runs already: {', '.join(living) or 'none'}")
            send(before.supervisor, signal.SIGHUP)
            _wait_healthy(places, before.supervisor, timeout_s, tell, known=living)
            return status(root)
        missing = [part for part in settings.parts if part not in living]
        for other in members(
            str(places.root), []
        ):  # of a supervisor that was killed together with its state
            if before is None:
                send(other, signal.SIGKILL)
        check(places, settings, secrets, missing)
        prepare(places, settings, secrets)
        if living:
            tell(f"runs already: {', '.join(living)}")
        adopted = before.parts if before is not None else {}
        if foreground:
            os.umask(0o077)
            supervisor = Supervisor(places, settings, secrets, adopted, say)
            supervisor.publish()  # while the lock is held: the next `up` must know of it
        else:
            identity = _start_supervisor(places, settings, adopted)
            tell(f"starting: {', '.join(missing) or 'the supervisor'}")
            try:
                _wait_healthy(places, identity, timeout_s, tell, known=living)
            except BaseException:
                if not living:
                    _stop(places, read_state(places), identity)
                raise
            return status(root)
    left = supervisor.run()
    if left:
        raise EvalError(f"could not be stopped: {', '.join(str(one.pid) for one in left)}")
    return {"healthy": False, "parts": []}


def _same_settings(places: Places, before: StackState, given: Mapping[str, Any]) -> StackSettings:
    running = before.settings.model_dump()
    asked = StackSettings.model_validate({**running, **given}).model_dump()
    for name in given:
        if asked[name] != running[name]:
            option = f"{name} {running[name]}"
            raise UsageError(
                f"a stack runs already for {places.root}, with {option} instead of {asked[name]}",
                "`concur down` first",
            )
    return before.settings


def _start_supervisor(
    places: Places, settings: StackSettings, adopted: Mapping[Part, Any]
) -> Identity:
    import json

    from flows.ops.processes import identify

    told = {
        "root": str(places.root),
        "settings": settings.model_dump(mode="json"),
        "adopted": {part: state.model_dump(mode="json") for part, state in adopted.items()},
    }
    with open(
        os.open(
            places.log("supervisor"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        ),
        "ab",
    ) as log:
        started = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.ops.supervisor"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, MARK: str(places.root)},
        )
    identity = identify(started.pid)
    assert identity is not None and started.stdin is not None  # not collected yet, so it is there
    with started.stdin as pipe:
        pipe.write(json.dumps(told).encode() + b"\n")
    return identity


def _wait_healthy(
    places: Places, supervisor: Identity, timeout_s: float, tell: Say, known: Iterable[Part]
) -> None:
    """Wait for the supervisor to say that all parts are well; tell of those that are not
    `known`."""
    deadline = time.monotonic() + timeout_s
    told: set[str] = set(known)
    while True:
        state = read_state(places)
        parts = state.parts if state is not None and state.supervisor == supervisor else {}
        for part, now in parts.items():
            if now.phase == "healthy" and part not in told:
                told.add(part)
                tell(f"healthy: {part} ({time.time() - now.since:.0f} s after its start)")
            if now.phase == "failed":
                raise EvalError(
                    f"{part} does not start: {now.reason}{tail(places, part)}",
                    f"its log is {places.log(part)}",
                )
        if parts and all(now.phase == "healthy" for now in parts.values()):
            return
        if not wait_gone([supervisor], LOOK_S):
            raise EvalError(
                f"the supervisor ended{tail(places, 'supervisor')}",
                f"its log is {places.log('supervisor')}",
            )
        if time.monotonic() > deadline:
            slow = [
                f"{part} ({now.reason or now.phase})"
                for part, now in parts.items()
                if now.phase != "healthy"
            ]
            raise EvalError(
                f"not healthy within {timeout_s:.0f} s: {', '.join(slow) or 'nothing started'}",
                f"see {places.logs}, or raise --timeout",
            )


def tail(places: Places, name: str) -> str:
    """The end of a log, on lines of its own."""
    try:
        with open(places.log(name), "rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - 8000))
            lines = handle.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n" + "\n".join(f"  | {line[:200]}" for line in lines[-TAIL_LINES:]) + "\n"


def down(root: str, tell: Say = lambda line: None) -> dict[str, Any]:
    """Stop a stack and everything that runs below it, within 70 s. Raises EvalError where something
    cannot be stopped."""
    places = Places(root)
    began = time.monotonic()
    if not places.stack.is_dir():
        return {"stopped": [], "seconds": 0.0}
    places.require_owner(0)
    try:
        with changing(places):
            state = read_state(places)
            found = members(
                str(places.root),
                [i for part in (state.parts.values() if state else ()) if (i := part.identity)],
            )
            stopped = state.living if state else []
            if found or (state and alive(state.supervisor)):
                tell(f"stopping {', '.join(reversed(stopped)) or f'{len(found)} processes'}")
            left = _stop(places, state, None)
    except PermissionError as error:
        raise UsageError(
            f"cannot look into {places.stack}: {error.strerror}",
            "run the command as the user who started it",
        ) from error
    if left:
        raise EvalError(
            f"processes that could not be stopped: {', '.join(str(one.pid) for one in left)}",
            "run it as the user who started them",
        )
    return {
        "stopped": stopped,
        "processes": len(found),
        "seconds": round(time.monotonic() - began, 1),
    }


def _stop(places: Places, state: StackState | None, supervisor: Identity | None) -> list[Identity]:
    supervisor = supervisor or (state.supervisor if state else None)
    if supervisor and send(supervisor, signal.SIGTERM) and wait_gone([supervisor], STOP_S):
        send(supervisor, signal.SIGKILL)
        wait_gone([supervisor], 5.0)
    runs = Runs(places, state.settings, _secrets_or_none(state.settings)) if state else None
    left = stop_parts(
        places,
        {part: now.identity for part, now in (state.parts if state else {}).items()},
        {},
        runs,
    )
    if supervisor and alive(supervisor):
        left = [*left, supervisor]
    if not left:
        clean(places)
    return left


def status(root: str) -> dict[str, Any]:
    """Each part as it is now: asked at its endpoint, not read from a file. Plain data; `healthy`
    only where all of it is."""
    places = Places(root)
    state = read_state(places)
    if state is None:
        return {
            "root": str(places.root),
            "running": False,
            "healthy": False,
            "supervisor": None,
            "parts": [],
        }
    settings = state.settings
    secrets = _secrets_or_none(settings)
    known = {program.part: program for program in programs(places, settings, secrets)}

    def row(part: Part) -> dict[str, Any]:
        now, program = state.parts.get(part), known[part]
        runs = now is not None and alive(now.identity)
        problem = (
            (fault(part, places, settings, secrets, now.since) or "")
            if runs
            else (now.reason if now else "") or "not running"
        )
        phase = (
            "healthy"
            if not problem
            else (
                now.phase
                if now and not runs
                else "starting"
                if now and now.phase == "starting"
                else "unhealthy"
            )
        )
        return {
            "part": part,
            "health": phase if phase != "healthy" or not problem else "unhealthy",
            "reason": problem,
            "pid": now.identity.pid if runs and now and now.identity else None,
            "port": program.port,
            "url": program.url,
            "restarts": now.restarts if now else 0,
            "processes": now.processes if runs and now else 0,
            "uptime_s": round(time.time() - now.since, 1) if runs and now else None,
            "log": str(places.log(part)),
        }

    with ThreadPoolExecutor(len(settings.parts)) as pool:
        rows = list(pool.map(row, settings.parts))
    guarded = alive(state.supervisor)
    return {
        "root": str(places.root),
        "running": guarded or bool(state.living),
        "supervisor": state.supervisor.pid if guarded else None,
        "healthy": guarded and all(one["health"] == "healthy" for one in rows),
        "parts": rows,
    }


def _secrets_or_none(settings: StackSettings) -> Secrets:
    try:
        return load_secrets(settings)
    except UsageError:  # to look, nobody must know them
        return Secrets()


def export_lines(root: str) -> list[str]:
    """Lines for a shell that point it at the stack; secrets by the name of the variable that holds
    them. Raises UsageError without one."""
    places = Places(root)
    state = read_state(places)
    if state is None:
        raise UsageError(
            f"no stack runs for {places.root}",
            f"start one with `concur up --root {shlex.quote(root)}`",
        )
    lines = [
        f"export {name}={shlex.quote(value)}"
        for name, value in client_environment(places, state.settings).items()
    ]
    if state.authenticated:
        lines += [
            f'export {name}="${source}"' for name, source in secret_names(state.settings).items()
        ]
        if "mlflow" in state.settings.parts:
            lines.append('export MLFLOW_TRACKING_USERNAME="${MLFLOW_AUTH_ADMIN_USERNAME:-admin}"')
    return lines


def use_stack(root: str, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Point this process at the stack of `root`, where one runs; variables that are set already
    win. Returns what is used, in words."""
    if "://" in root:
        return []
    places = Places(root)
    state = read_state(places)
    if state is None or not state.living:
        return []
    wanted = client_environment(places, state.settings)
    if (
        "PREFECT_API_URL" in environment
        or "PREFECT_HOME" in environment
        or "PREFECT_PROFILE" in environment
    ):
        wanted = {name: value for name, value in wanted.items() if not name.startswith("PREFECT_")}
    if "RAY_ADDRESS" in environment:
        wanted = {name: value for name, value in wanted.items() if not name.startswith("RAY_")}
    secrets = _secrets_or_none(state.settings)
    said = []
    for part, name, address in (
        ("prefect", "PREFECT_API_URL", state.settings.prefect_url),
        ("mlflow", "MLFLOW_TRACKING_URI", state.settings.mlflow_url),
        ("ray", "RAY_ADDRESS", state.settings.ray_address),
    ):
        if name not in wanted or name in environment:
            continue
        if part not in state.living or (problem := fault(part, places, state.settings, secrets)):
            problem = problem if part in state.living else "it does not run"
            raise UsageError(
                f"the stack of {places.root} has no healthy {part}: {problem}",
                "`concur status` shows it; `concur down` stops it",
            )
        said.append(f"{part} {address}")
    for name, value in wanted.items():
        environment.setdefault(name, value)
    if state.authenticated:
        for name, source in secret_names(state.settings).items():
            if source in environment:
                environment.setdefault(name, environment[source])
        environment.setdefault("MLFLOW_TRACKING_USERNAME", secrets.mlflow_user)
    return said


def join_stack(root: str) -> None:
    """Use the stack of `root` in this process where one runs, and say so. To be called before
    prefect is imported. Raises UsageError where a part of it is not well: a run that went elsewhere
    would not be seen where it is looked for.
    """
    if used := use_stack(root):
        print(
            f"uses the stack of {Places(root).root}: {', '.join(used)}", file=sys.stderr, flush=True
        )
