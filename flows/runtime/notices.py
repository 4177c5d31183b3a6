"""Tells somebody when a run ends badly: hooks of Prefect's that start a command or post to a
webhook, by `guard.notify` of the run.

Guarantees: a notice holds names, states, times, counts and addresses of ours, never text that a
model or a task wrote, and no error's words (they may quote it), only the error's kind; the
webhook's address is in no log, artifact or list of processes; a hook that fails or hangs costs its
time limit and a line in the log, and changes nothing of the run. One notice a run: subflows are
silent. Where the worker itself is gone no hook runs: `deployments/automations` has what the server
does by itself.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import subprocess
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import BaseModel

from flows.runtime.config import NotifyConfig
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Json

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

    from flows.config import PipelineConfig

log = logging.getLogger(__name__)
KIND = re.compile(r"^(?:Flow|Task) run encountered an exception:? ([A-Za-z_][A-Za-z0-9_]*):")
"""Prefect's words before an error's class. What follows are the error's own."""
NAME_CHARS = 200


def notice_of(flow: Flow[..., object], run: FlowRun, state: State) -> Json:
    """What is told of a run: the same keys each time, null where there is nothing to tell."""
    from prefect.settings import get_current_settings

    kind = KIND.match(state.message or "")
    begun, ended, page = run.start_time, state.timestamp, get_current_settings().ui_url
    # Prefect asks for the notice while the last state is still on its way.
    cancelled = state.type.value == "CANCELLING"
    return {
        "event": "concur run ended badly",
        "flow": str(flow.name),
        "run": str(run.name)[:NAME_CHARS],
        "run_id": str(run.id),
        "state": "CANCELLED" if cancelled else state.type.value,
        "state_name": "Cancelled" if cancelled else state.name,
        "error_kind": kind[1] if kind else None,
        "started_at": begun.isoformat() if begun else None,
        "ended_at": ended.isoformat() if ended else None,
        "run_count": run.run_count,
        "url": f"{page}/runs/flow-run/{run.id}" if page else None,
        "next": ("start the same run again to resume; its artifact `unfinished` says what is kept"),
    }


def tell(flow: Flow[..., object], flow_run: FlowRun, state: State) -> None:
    """The hook; the names of its arguments are Prefect's, whose worker passes them by name. Never
    raises."""
    try:
        config = _config(flow, flow_run)
        if flow_run.parent_task_run_id is not None or config is None:
            return
        deliver(config, notice_of(flow, _complete(flow_run), state))
    except Exception as error:  # a notice must not become the next fault
        run_id, kind = getattr(flow_run, "id", "?"), type(error).__name__
        log.error("the notice that run %s ended could not be sent: %s", run_id, kind)


def _complete(run: FlowRun) -> FlowRun:
    """The run as the server has it, where this copy is from before its start: the worker's, of a
    run that was killed, has not its name."""
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    if run.start_time is not None or not get_current_settings().api.url:
        return run
    try:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(run.id)
    except Exception:  # the notice then has what is known here
        return run


def deliver(config: NotifyConfig, notice: Json) -> None:
    """Start the command, post to the webhook; what fails is logged by its kind."""
    body = json.dumps(notice)
    if config.command:
        _run(config, notice, body)
    try:
        if (url := webhook(config)) is not None:
            _post(url, body, config.timeout_s)
    except EvalError as error:  # ours: it names the variable or the block, never what they hold
        log.error("the webhook of guard.notify was not called: %s", error)
    except Exception as error:
        log.error("the webhook of guard.notify did not accept the notice: %s", type(error).__name__)


def _run(config: NotifyConfig, notice: Json, body: str) -> None:
    named = {
        f"CONCUR_NOTICE_{key.upper()}": str(value)
        for key, value in notice.items()
        if value is not None
    }
    program = config.command[0]
    try:
        subprocess.run(
            config.command,
            input=body,
            text=True,
            env=os.environ | named,
            timeout=config.timeout_s,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        log.error("the command of guard.notify, %s, exited with %s", program, error.returncode)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("the command of guard.notify, %s, failed: %s", program, type(error).__name__)


def webhook(config: NotifyConfig) -> str | None:
    """The address, None where none is configured. Raises UsageError where what should hold it does
    not, without saying what it holds."""
    if config.webhook_block:
        from tasks.policy import secret

        url = secret(config.webhook_block)
        place = f"the Prefect secret block {config.webhook_block}"
    elif config.webhook_env:
        url = os.environ.get(config.webhook_env, "").strip()
        place = f"the environment variable {config.webhook_env}"
    else:
        return None
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UsageError(
            f"{place} contains no HTTP address",
            "set it to the webhook's address in the environment of the worker",
        )
    return url


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None  # the address is a secret between two: it goes nowhere else


def _post(url: str, body: str, timeout_s: float) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body.encode(), headers=headers, method="POST")
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s):
        pass


def _config(flow: Flow[..., object], run: FlowRun) -> NotifyConfig | None:
    """`guard.notify` of the run's configuration, where it names somebody.

    The configuration is an object in the run's own process and plain data in the worker's. A
    deployed flow has forms instead: what they say is made a configuration again.
    """
    parameters = run.parameters or {}
    config = parameters.get("config")
    if config is None and (made := _of_forms(flow, parameters)):
        config = made.model_dump(mode="json", include={"guard"})
    elif isinstance(config, BaseModel):
        config = config.model_dump(mode="json")
    found = ((config or {}).get("guard") or {}).get("notify") or {}
    notify = NotifyConfig.model_validate(found)
    return notify if notify.command or notify.webhook_env or notify.webhook_block else None


def _of_forms(flow: Flow[..., object], parameters: Json) -> PipelineConfig | None:
    from flows.forms import ADVANCED, AdvancedForm, Form, RunForm, configuration

    given = flow.validate_parameters(parameters)
    filled = {
        name: given.get(name, parameter.default)
        for name, parameter in inspect.signature(flow.fn).parameters.items()
    }
    first, advanced = filled.pop("run", None), filled.pop("advanced", ADVANCED)
    filled.pop("sweep", None)  # says nothing of one run's configuration
    forms = [form for form in filled.values() if isinstance(form, Form)]
    if isinstance(first, RunForm) and isinstance(advanced, AdvancedForm):
        return configuration(first, *forms, advanced=advanced)
    return None


NOTICES: Json = {"on_failure": [tell], "on_crashed": [tell], "on_cancellation": [tell]}
"""Of every flow of the line."""
