"""Tells somebody when a run ends badly: hooks of Prefect's that start a command or post to a
webhook, by `guard.notify` of the run.

Guarantees: a notice holds names, states, times, counts and addresses of ours, never text that a
model or a task wrote, and no error's words (they may quote it), only the error's kind; the
webhook's address is in no log, artifact or list of processes; a hook that fails or hangs costs its
time-out and a line in the log, and changes nothing of the run. One notice a run: subflows are
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
from typing import Any
from urllib.parse import urlsplit

from flows.runtime.config import NotifyConfig
from kernels_eval.errors import EvalError, UsageError

log = logging.getLogger(__name__)
KIND = re.compile(r"^(?:Flow|Task) run encountered an exception:? ([A-Za-z_][A-Za-z0-9_]*):")
"""Prefect's words before an error's class. What follows are the error's own."""
NAME_CHARS = 200


def notice_of(flow: Any, run: Any, state: Any) -> dict[str, Any]:
    """What is told of a run: the same keys each time, null where there is nothing to tell."""
    kind = KIND.match(state.message or "")
    begun, ended = getattr(run, "start_time", None), getattr(state, "timestamp", None)
    cancelled = (
        state.type.value == "CANCELLING"
    )  # Prefect asks for the notice while the last state is still on its way
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
        "run_count": getattr(run, "run_count", None),
        "url": _url(run),
        "next": (
            "the same run again goes on from what is kept; its artifact `unfinished` says what"
            " that is"
        ),
    }


def tell(flow: Any, flow_run: Any, state: Any) -> None:
    """The hook; the names of its arguments are Prefect's, whose worker passes them by name. Never
    raises."""
    try:
        config = _config(flow, flow_run)
        if flow_run.parent_task_run_id is not None or config is None:
            return
        deliver(config, notice_of(flow, _known(flow_run), state))
    except Exception as error:  # a notice must not become the next fault
        log.error(
            "nobody was told of the end of run %s: %s",
            getattr(flow_run, "id", "?"),
            type(error).__name__,
        )


def _known(run: Any) -> Any:
    """The run as the server has it, where this copy is from before its start: the worker's, of a
    run that was killed, has not its name."""
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    if run.start_time is not None or not get_current_settings().api.url:
        return run
    try:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(run.id)
    except Exception:  # then it is told of by what there is
        return run


def deliver(config: NotifyConfig, notice: dict[str, Any]) -> None:
    """Start the command, post to the webhook; what fails is logged by its kind."""
    body = json.dumps(notice)
    if config.command:
        named = {
            f"CONCUR_NOTICE_{key.upper()}": str(value)
            for key, value in notice.items()
            if value is not None
        }
        try:
            done = subprocess.run(
                config.command,
                input=body,
                text=True,
                env=os.environ | named,
                timeout=config.timeout_s,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            if done.returncode:
                log.error(
                    "the command of guard.notify, %s, ended with status %s",
                    config.command[0],
                    done.returncode,
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.error(
                "the command of guard.notify, %s, did not do it: %s",
                config.command[0],
                type(error).__name__,
            )
    try:
        if (url := webhook(config)) is not None:
            _post(url, body, config.timeout_s)
    except EvalError as error:  # ours: it names the variable or the block, never what they hold
        log.error("the webhook of guard.notify was not called: %s", error)
    except Exception as error:
        log.error("the webhook of guard.notify did not take the notice: %s", type(error).__name__)


def webhook(config: NotifyConfig) -> str | None:
    """The address, None where none is configured. Raises UsageError where what should hold it does
    not, without saying what it holds."""
    if config.webhook_block:
        from tasks.policy import secret

        url, place = (
            secret(config.webhook_block),
            f"the Prefect secret block {config.webhook_block}",
        )
    elif config.webhook_env:
        url, place = (
            os.environ.get(config.webhook_env, "").strip(),
            f"the environment variable {config.webhook_env}",
        )
    else:
        return None
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UsageError(
            f"{place} holds no HTTP address",
            "put the webhook's there, in the environment of the worker",
        )
    return url


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # the address is a secret between two: it goes nowhere else


def _post(url: str, body: str, timeout_s: float) -> None:
    asked = urllib.request.Request(
        url, data=body.encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.build_opener(_NoRedirect).open(asked, timeout=timeout_s):
        pass


def _config(flow: Any, run: Any) -> NotifyConfig | None:
    """`guard.notify` of the run's configuration, which is an object in the run's own process and
    plain data in the worker's.

    A deployed flow has forms instead: what they say is made a configuration again.
    """
    if "config" not in (run.parameters or {}):
        from flows.forms import Form, configuration

        given = flow.validate_parameters(run.parameters or {})
        filled = {
            name: given.get(name, parameter.default)
            for name, parameter in inspect.signature(flow.fn).parameters.items()
        }
        forms = [
            form for name, form in filled.items() if isinstance(form, Form) and name != "sweep"
        ]
        return _asked(configuration(*forms).guard.notify) if forms else None
    config = (run.parameters or {}).get("config")
    found = (
        config.get("guard", {}).get("notify")
        if isinstance(config, dict)
        else getattr(getattr(config, "guard", None), "notify", None)
    )
    if found is None:
        return None
    return _asked(found if isinstance(found, NotifyConfig) else NotifyConfig.model_validate(found))


def _asked(found: NotifyConfig) -> NotifyConfig | None:
    return found if found.command or found.webhook_env or found.webhook_block else None


def _url(run: Any) -> str | None:
    from prefect.settings import get_current_settings

    base = get_current_settings().ui_url
    return f"{base}/runs/flow-run/{run.id}" if base else None


NOTICES: dict[str, Any] = {"on_failure": [tell], "on_crashed": [tell], "on_cancellation": [tell]}
"""Options of every flow of the line."""
