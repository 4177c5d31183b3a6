"""Commands of a stack: start it, show it, stop it, and point a run at it.

`up` starts nothing twice and stops nothing; `down` ends all that `up` started, even without
supervisord: first flow runs, which have `RUNS_GRACE_S` to report to the servers.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from flows.stack.health import fault, runs_under_way, scores_page
from flows.stack.layout import PARTS, ROOT_VARIABLE, Layout, Part, StackSettings
from flows.stack.programs import STOP_S, client_environment, configuration
from flows.stack.supervisor import Supervisor, ends
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.installation import command_at
from kernels_eval.records import Json
from kernels_eval.sandbox.process_tree import (
    command_line,
    environment_variable,
    identify,
    send,
    wait_gone,
)
from tasks.files import atomic_write
from tasks.reporting.text import plural, printable, shortened

LOOK_S = 1.0
SAY_S = 10.0
USUAL = "half a minute on an idle machine, minutes on a busy one"
"""How long a stack starts."""
RUNS_GRACE_S = 18.0
"""A stopped run needs 15 s at most (flows.runtime.shutdown), then reports."""
KILL_S = 5.0
TAIL_LINES, LAST_CHARS = 12, 100
AFTER_A_RUN = "none until the first run has ended"
"""In place of MLflow's page: its list of experiments leads to pages for traces."""
RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Prefect sets it in a run's process."""
ADDRESSES: dict[Part, str] = {
    "prefect": "PREFECT_API_URL",
    "mlflow": "MLFLOW_TRACKING_URI",
    "ray": "RAY_ADDRESS",
}
OWN_CHOICE = {
    "PREFECT_": ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE"),
    "RAY_": ("RAY_ADDRESS",),
}
"""Variables by which a caller keeps a process away from a part of a stack."""
Say = Callable[[str], None]


# -- start -----------------------------------------------------------------------------------------


def up(root: str, settings: StackSettings, say: Say, timeout_s: float | None = None) -> Json:
    """Start a stack, or its missing parts, and wait until all is healthy. Returns `status`. Raises
    UsageError for what must be corrected first, EvalError where a part is not healthy within
    `timeout_s`."""
    layout = Layout(root)
    layout.make()
    supervisor = Supervisor(layout)
    with layout.changing():
        if supervisor.pid() is None:
            _end(_servers(layout))
            _require_ports(settings)
            _start(layout, settings, supervisor)
            say(f"starting {', '.join(PARTS)}: {USUAL}")
        else:
            _require_same(layout, settings)
            for part, process in supervisor.processes().items():
                if process["statename"] == "FATAL":
                    supervisor.ask("startProcess", part, False)
    _wait_healthy(layout, say, timeout_s)
    return status(root)


def _start(layout: Layout, settings: StackSettings, supervisor: Supervisor) -> None:
    layout.make_sockets()
    atomic_write(layout.ray_token, secrets.token_hex(32), mode=0o600)
    atomic_write(layout.configuration, configuration(layout, settings), mode=0o600)
    layout.write_settings(settings)
    supervisor.start()


def _require_same(layout: Layout, settings: StackSettings) -> None:
    if layout.read_settings() not in (settings, None):
        raise UsageError(
            f"a stack is already running for {layout.root} with other ports",
            f"`{command_at('down', layout.root)}` first, or leave the options out",
        )


def _require_ports(settings: StackSettings) -> None:
    for port, part in settings.ports.items():
        try:
            with socket.socket() as tried:
                # a port whose last owner has just gone is free
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(
                f"port {port} for {part} is in use{_holder(port)}",
                f"give another one with --{part}-port, or stop what holds it",
            ) from error


def _holder(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            listens = found.laddr and found.laddr.port == port
            if listens and found.status == psutil.CONN_LISTEN and found.pid:
                return f" by process {found.pid} ({command_line(found.pid)[:100]})"
    return ""


def _wait_healthy(layout: Layout, say: Say, timeout_s: float | None) -> None:
    began = said = time.monotonic()
    again, stop = (command_at(verb, layout.root) for verb in ("up", "down"))
    healthy: dict[str, int] = {}  # process of each part that was: one late answer changes nothing
    ended = {part: ends(layout, part) for part in PARTS}
    while True:
        pid, rows = _look(layout)
        missing = []
        for row in rows:
            if row["health"] == "healthy" and healthy.get(row["part"]) != row["pid"]:
                healthy[row["part"]] = row["pid"]
                say(f"healthy: {row['part']}")
            if healthy.get(row["part"], 0) != row["pid"]:
                missing.append(row)
            if (times := ends(layout, row["part"])) > ended[row["part"]]:
                ended[row["part"]] = times
                say(f"{row['part']} ended and is started again{_last_words(row)}")
        if pid and not missing:
            return
        now = time.monotonic()
        _require_starting(layout, pid, rows, now - began)
        if timeout_s is not None and now - began > timeout_s:
            waiting = ", ".join(f"{row['part']} ({row['reason']})" for row in missing)
            raise EvalError(
                f"not healthy within {timeout_s:.0f} s: {waiting}",
                f"it goes on starting: `{again}` waits for it, `{stop}` stops it",
            )
        if now - said >= SAY_S:
            said = now
            say(f"{now - began:3.0f} s  waiting for {awaited(missing, now - began)}")
        time.sleep(LOOK_S)


def awaited(rows: list[Json], waited_s: float) -> str:
    """Parts that are not healthy, in one line: why, and since when one of them runs that was
    started after or long before this wait."""
    parts: dict[str, list[str]] = {}
    for row in rows:
        uptime_s = row["uptime_s"]
        usual = uptime_s is None or abs(uptime_s - waited_s) < SAY_S
        since = "" if usual else f", started {uptime_s:.0f} s ago"
        parts.setdefault(f"{row['reason']}{since}", []).append(row["part"])
    told = [f"{', '.join(names)} ({why})" for why, names in parts.items()]
    return "; ".join(told) or "supervisord"


def _last_words(row: Json) -> str:
    """The end of a part's log, in one line."""
    lines = _read_end(Path(row["log"])).strip().splitlines()
    return f"; its log ends: {shortened(printable(lines[-1]).strip(), LAST_CHARS)}" if lines else ""


def _require_starting(layout: Layout, pid: int | None, rows: list[Json], waited_s: float) -> None:
    again, stop = (command_at(verb, layout.root) for verb in ("up", "down"))
    for row in rows:
        if row["health"] == "failed":
            hint = f"its log is {row['log']}; the other parts go on, `{stop}` stops them"
            raise EvalError(f"{row['part']} does not start{tail(layout, row['part'])}", hint)
    if not layout.settings.exists():
        raise EvalError("the stack was stopped meanwhile", f"run `{again}` again")
    if pid is None and waited_s > KILL_S and not layout.processes():
        problem = f"supervisord ended{tail(layout, 'supervisord-output')}"
        raise EvalError(problem, f"see {layout.logs}")


def tail(layout: Layout, name: str) -> str:
    lines = _read_end(layout.log(name)).splitlines()[-TAIL_LINES:]
    if not lines:
        return ""
    return "\n" + "\n".join(f"  | {line[:200]}" for line in lines) + "\n"


def _read_end(log: Path) -> str:
    try:
        return log.read_bytes()[-8000:].decode(errors="replace")
    except OSError:
        return ""


# -- stop ------------------------------------------------------------------------------------------


def down(root: str, say: Say) -> Json:
    """Stop a stack and everything below it. Raises EvalError where something cannot be stopped."""
    layout = Layout(root)
    began = time.monotonic()
    if not layout.stack.is_dir():
        return {"processes": 0, "seconds": 0.0, "note": f"no stack is running for {layout.root}"}
    layout.require_owner()
    with layout.changing():
        processes = layout.processes()
        if runs := _flow_runs(processes):
            say(f"stopping {len(runs)} flow run{'s' if len(runs) > 1 else ''}")
            for run in runs:
                send(run, signal.SIGTERM)
            wait_gone(runs, RUNS_GRACE_S)
        supervisor = Supervisor(layout)
        if (pid := supervisor.pid()) and (manager := identify(pid)):
            _stop_parts(supervisor, say)
            supervisor.ask("shutdown")
            wait_gone([manager], STOP_S * 5)
        if left := _end(layout.processes()):
            pids = ", ".join(str(process.pid) for process in left)
            raise EvalError(f"processes that could not be stopped: {pids}", "stop them yourself")
        layout.clean()
    seconds = round(time.monotonic() - began, 1)
    note = "" if processes else f"no stack is running for {layout.root}"
    return {"processes": len(processes), "seconds": seconds, "note": note}


def _stop_parts(supervisor: Supervisor, say: Say) -> None:
    """Stop all parts at once: supervisord's own end takes them one after the other."""
    say(f"stopping {', '.join(PARTS)}: each has {STOP_S} s")
    supervisor.ask("stopAllProcesses", False)
    began = said = time.monotonic()
    while (left := _running(supervisor)) and time.monotonic() - began < STOP_S + KILL_S:
        if time.monotonic() - said >= SAY_S / 2:
            said = time.monotonic()
            say(f"{said - began:3.0f} s  waiting for {', '.join(left)} to end")
        time.sleep(LOOK_S / 4)


def _running(supervisor: Supervisor) -> list[str]:
    return [part for part, process in supervisor.processes().items() if process["pid"]]


def _end(processes: list[psutil.Process]) -> list[psutil.Process]:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            send(process, number)
        processes = wait_gone(processes, KILL_S)
    return processes


def _flow_runs(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if environment_variable(one.pid, RUN_VARIABLE)]


def _servers(layout: Layout) -> list[psutil.Process]:
    found = layout.processes()
    runs = _flow_runs(found)
    return [process for process in found if process not in runs]


# -- look ------------------------------------------------------------------------------------------


def status(root: str) -> Json:
    """Current state of each part, asked at its endpoint, as plain data; `healthy` where all is."""
    layout = Layout(root)
    settings, start = layout.read_settings(), command_at("up", layout.root)
    if settings is None:
        return {
            "root": str(layout.root),
            "supervisor_pid": None,
            "healthy": False,
            "note": f"no stack is running: `{start}` starts one{_or_another(layout)}",
            "parts": [],
        }
    with ThreadPoolExecutor() as asked:  # a busy machine answers late
        scores, runs = asked.submit(scores_page, settings), asked.submit(runs_under_way, settings)
        pid, parts = _look(layout)
    for row in parts:
        if row["part"] == "mlflow" and row["health"] == "healthy":
            row["page"] = scores.result() or AFTER_A_RUN
    return {
        "root": str(layout.root),
        "supervisor_pid": pid,
        "healthy": pid is not None and all(row["health"] == "healthy" for row in parts),
        "note": "" if pid else f"supervisord is not running: `{start}` starts it and all parts",
        "runs": runs.result(),
        "parts": parts,
    }


def _look(layout: Layout) -> tuple[int | None, list[Json]]:
    """supervisord's process, and a row for each part, asked at its endpoint."""
    settings, supervisor = layout.read_settings(), Supervisor(layout)
    if settings is None:
        return None, []
    processes = supervisor.processes()
    with ThreadPoolExecutor() as asked:
        rows = [asked.submit(_row, part, layout, settings, processes.get(part)) for part in PARTS]
    return supervisor.pid(), [row.result() for row in rows]


def _row(part: Part, layout: Layout, settings: StackSettings, process: Json | None) -> Json:
    state = process["statename"] if process else ""
    pages = {
        "prefect": settings.prefect_url,
        "mlflow": "",
        "ray": settings.ray_address,
        "worker": "",
    }
    if process is None:
        health, reason = "stopped", "not running"
    elif state == "FATAL":
        health, reason = "failed", process["spawnerr"] or process["description"]
    elif not process["pid"]:
        ended = process["spawnerr"] or process["description"]
        health, reason = "restarting", f"{ended[:1].lower()}{ended[1:]}: starts again by itself"
    else:
        reason = fault(part, layout, settings, process["start"])
        health = ("starting" if state == "STARTING" else "unhealthy") if reason else "healthy"
    if reason and process and (times := ends(layout, part)):
        reason += f"; ended {plural(times, 'time')} so far, its log is {layout.log(part)}"
    return {
        "part": part,
        "health": health,
        "reason": reason,
        "pid": process["pid"] or None if process else None,
        "uptime_s": round(time.time() - process["start"], 1)
        if process and process["pid"]
        else None,
        "page": pages[part],
        "log": str(layout.log(part)),
    }


# -- use -------------------------------------------------------------------------------------------


def how_to_start(root: str) -> str | None:
    """The command that starts the stack of `root`, and the root of another that is up; None for a
    root that can have none."""
    if "://" in root:
        return None
    text = command_at("up", root)
    for other in _other_roots(Layout(root))[:1]:
        down = command_at("down", other)
        text += f" (the stack of {other} is up: `{down}` first, or give other ports)"
    return text


def _other_roots(layout: Layout) -> list[str]:
    """The roots of other stacks that run here."""
    roots = {environment_variable(pid, ROOT_VARIABLE) for pid in psutil.pids()}
    return sorted(filter(None, roots - {str(layout.root)}))


def _or_another(layout: Layout) -> str:
    """Which stack runs instead, if one does, and how to use it."""
    return "".join(
        f"; one runs for {other}: give --root {other}, or set CONCUR_ROOT"
        for other in _other_roots(layout)[:1]
    )


def export_lines(root: str) -> list[str]:
    """Shell lines that point at the stack. Raises UsageError without one."""
    layout = Layout(root)
    settings = layout.read_settings()
    if settings is None:
        raise UsageError(
            f"no stack is running for {layout.root}",
            f"start one with `{command_at('up', root)}`{_or_another(layout)}",
        )
    variables = client_environment(layout, settings)
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def use_stack(root: str, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Point this process at the running stack of `root`; variables that are set already win.
    Returns what is used, in words. Raises UsageError where a part is not healthy."""
    if "://" in root:
        return []
    layout = Layout(root)
    settings = layout.read_settings()
    if settings is None or Supervisor(layout).pid() is None:
        return []
    wanted = client_environment(layout, settings)
    for prefix, choices in OWN_CHOICE.items():
        if any(name in environment for name in choices):
            wanted = {name: value for name, value in wanted.items() if not name.startswith(prefix)}
    joined = [part for part, name in ADDRESSES.items() if name in wanted.keys() - environment]
    for name, value in wanted.items():
        environment.setdefault(name, value)
    for part in joined:  # to ask Ray imports it, and on import it reads where it may listen
        if problem := fault(part, layout, settings):
            raise UsageError(
                f"the stack of {layout.root} has no healthy {part}: {problem}",
                f"`{command_at('status', root)}` shows it; `{command_at('down', root)}` stops it",
            )
    return [f"{part} {wanted[ADDRESSES[part]].removesuffix('/api')}" for part in joined]


def join_stack(root: str) -> None:
    """Use the stack of `root`, where one runs, and print it. Call before importing prefect. Raises
    UsageError where a part is not healthy."""
    if used := use_stack(root):
        line = f"uses the stack of {Layout(root).root}: {', '.join(used)}"
        print(line, file=sys.stderr, flush=True)
