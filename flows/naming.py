"""Names of flow runs: what they do, and for which configuration. A name that a person typed
stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"),
    *("iota", "kappa", "lambda", "mu", "nu", "xi", "omicron", "pi"),
    *("rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)
PRAISE = (
    *("Awesome", "Rustic", "Small", "Gorgeous", "Fantastic", "Sleek", "Intelligent", "Unbranded"),
    *("Refined", "Licensed", "Generic", "Practical", "Ergonomic", "Handcrafted", "Tasty"),
    *("Handmade", "Incredible"),
)
OF_FORMS = re.compile(
    rf"(?:{'|'.join(GREEK)})(?:\d+(?:-[a-z]+)+|(?:-[a-z]+){{2,}})"
    rf"|(?:{'|'.join(PRAISE)})-[A-Z].{{1,5}}"
)
"""What the forms of Prefect 3.9 put into Run Name: a star (V1) or an animal (V2). The one star in
twenty that has two words and no number stays: a person may type `beta-run`."""


_verbs: set[str] = set()
"""Those of this process's flows."""


def run_name(verb: str) -> Callable[[], str]:
    """A `flow_run_name`: the one that was typed, else the verb and what the run is about, before
    the name under which a deployment's run was submitted: its form and log have told that one."""
    _verbs.add(verb)

    def name() -> str:
        return typed_name() or " ".join(filter(None, (verb, _about(), submitted_name())))

    return name


def submitted_name() -> str:
    """The name under which a deployment's run was submitted, typed or not; else empty."""
    from prefect.runtime import deployment

    return _given_name() if deployment.id else ""


def typed_name() -> str:
    """The name that a person typed for this flow run; empty where Prefect or `run_name` made it,
    and outside of a run."""
    from prefect.runtime import flow_run

    given = _given_name()
    return (flow_run.name or "") if given and not is_generated(given) else ""


def _given_name() -> str:
    """This flow run's name without what `run_name` put before it."""
    from prefect.runtime import flow_run

    name: str = flow_run.name or ""
    for verb in _verbs:
        made = f"{verb} {_about()}".rstrip()
        if name == made or name.startswith(f"{made} "):
            return name.removeprefix(made).lstrip()
    return name


def _about() -> str:
    """The name in the overrides of `advanced`, else the name or the profile of `config` or `run`.
    Never stops a run: a name that parameters lack is left out."""
    from prefect.runtime import flow_run

    parameters = flow_run.parameters or {}
    told = parameters.get("config") or parameters.get("run")
    about = getattr(told, "name", "") or getattr(told, "profile", "")
    for setting in getattr(parameters.get("advanced"), "overrides", ()):
        key, _, value = setting.partition("=")
        if key == "name":
            about = value
    return about


def is_generated(name: str) -> bool:
    """Whether Prefect made up this name: nothing else in a flow run tells. Its server joins two
    words of a list, its forms are `OF_FORMS`."""
    first, separator, second = name.partition("-")
    of_server = bool(separator) and {first, second} <= _words()
    return of_server or OF_FORMS.fullmatch(name) is not None


@cache
def _words() -> frozenset[str]:
    """The words of which Prefect's server makes names; none where it has another list."""
    try:
        from coolname.data import config
    except ImportError:
        return frozenset()
    lists: Any = config.values()
    return frozenset(word for each in lists for word in each.get("words", ()))
