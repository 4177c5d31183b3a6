"""Bounded, quiet connections to MLflow: a server that does not answer is an error within about a
minute; environment and loggers are restored."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kernels_eval.errors import EvalError, UsageError, cause_of
from kernels_eval.records import Json
from tasks.retry import DEADLINE_S, retry_until_back
from tasks.tracking.config import PARENTS
from tasks.tracking.writing import NOTE_TAG, PARENT_TAG, Runs

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

HTTP_TIMEOUT_S = 15
HTTP_RETRIES = 2
DATABASE_TIMEOUT_S = 10
BACK_S = DEADLINE_S
"""Seconds to wait for a server that died."""


class View(NamedTuple):
    """A page of an experiment's runs: which runs, what of them is shown, and their order."""

    query: str
    params: tuple[str, ...]
    metrics: tuple[str, ...]
    order: str = "tags.`mlflow.source.name`"
    """Descending, then newest first; all have one source. By begin, MLflow would fold branches into
    their ablation and chart nothing."""
    section: str = "Branches side by side"


LINE_SCORES = (
    *("recorded.exec_at_1", "base.exec_at_1", "tuned.exec_at_1"),
    *("base.fast_1_at_1", "tuned.fast_1_at_1"),
)
BRANCH_SCORES = ("exec_at_1", "fast_1_at_1")
TITLES = {
    "correct_share": "Correct, share",
    "correct": "Correct, count",
    "candidates": "Verified, count",
    "curated": "Selected, count",
    "recorded.exec_at_1": "Recorded solved, share",
    "base.exec_at_1": "Base solved, share",
    "tuned.exec_at_1": "Tuned solved, share",
    "base.fast_1_at_1": "Base faster, share",
    "tuned.fast_1_at_1": "Tuned faster, share",
    "exec_at_1": "Solved, share",
    "fast_1_at_1": "Faster, share",
}
"""Titles of charts, by metric: short, since MLflow cuts them."""
SCORES = "scores"
ALL_RUNS = View(
    PARENTS,
    ("strategy",),
    ("correct_share", "correct", "candidates", "curated", *LINE_SCORES, *BRANCH_SCORES),
    section="Runs side by side",
)
GRID = {"columns": 1, "cardHeight": 200}
"""One column: beside MLflow's assistant a second one leaves no room for a title."""
FOLDED_SECTIONS = ("Model metrics", "System metrics")
"""MLflow's own, where it charts every other metric."""
DESCRIPTION = """\
One bar a run, the newest first; times in names are UTC, and a name that was typed has none. More:
the arrow at the right.

Of a refresh: how many candidates were verified, how many of them are correct (of different numbers,
compare the share), and how many of these were selected for the training set.

Of a benchmark (runs of the whole pipeline, and branches of an ablation): solved is the share of
held-out tasks with a correct kernel in one answer, faster the share with one faster than PyTorch.
A run of the whole pipeline has both of the recorded answers, the base model and the tuned one.

Branches have metrics of the same names (`exec_at_1`, `fast_1_at_1`, each with `_lower` and
`_upper`, its 95 % interval over tasks) and params `strategy`, `size` and `seed`: `concur ablate`
prints the page of their charts."""
"""Text above an experiment's runs."""


def experiment_tags() -> dict[str, str]:
    """Tags of a new experiment: its description, and the page of all runs."""
    return {NOTE_TAG: DESCRIPTION, **view_tag(SCORES, ALL_RUNS)}


def branches_of(run_id: str) -> View:
    """The branches of an ablation, given its run."""
    query = f"tags.`{PARENT_TAG}` = '{run_id}'"
    return View(query, ("strategy", "size", "seed"), BRANCH_SCORES, "metrics.`exec_at_1`")


def view_tag(name: str, view: View) -> dict[str, str]:
    """The tag of an experiment that holds a page, as MLflow's "share" button writes it: a table,
    and a bar chart of each metric."""
    return {f"mlflow.sharedViewState.{name}": json.dumps(_shared_state(view))}


def _shared_state(view: View) -> Json:
    return {
        "searchFilter": view.query,
        "orderByKey": view.order,
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [
            *(f"params.`{name}`" for name in view.params),
            *(f"metrics.`{name}`" for name in view.metrics),
        ],
        "compareRunCharts": [
            {
                **{"type": "BAR", "uuid": name, "metricSectionId": "shown"},
                # its title is the key, and its data are under the other
                **{"metricKey": TITLES[name], "dataAccessKey": name},
                **{"runsCountToCompare": 20, "deleted": False, "isGenerated": False},
            }
            for name in view.metrics
        ],
        "compareRunSections": [
            {"uuid": "shown", "name": view.section, "display": True, "isReordered": True, **GRID},
            *(
                {"uuid": name, "name": name, "display": False, "isReordered": True}
                for name in FOLDED_SECTIONS
            ),
        ],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }


T = TypeVar("T")


@contextmanager
def bounded_and_quiet() -> Iterator[None]:
    """Set short time-outs and silence output; the user's environment wins, and all is restored."""
    settings = {
        # MLflow's defaults (120 s, 7 retries, whatever pause the server asks for) are many minutes
        # on a server that does not answer
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(HTTP_TIMEOUT_S),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(HTTP_RETRIES),
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        # read at import: a run talks to the tracking URI alone
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    levels: dict[logging.Logger, int] = {}
    try:
        import mlflow

        for name, level in ((mlflow.__name__, logging.WARNING), ("urllib3", logging.ERROR)):
            logger = logging.getLogger(name)
            levels[logger] = logger.level
            logger.setLevel(level)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        for name in added:
            os.environ.pop(name, None)


def _is_database(uri: str) -> bool:
    return re.match(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?://", uri) is not None


class Destination(NamedTuple):
    """Where runs are written.

    `tracking_uri` is `sqlite:///...`, another database or an http(s) server, which places artifacts
    itself. `artifact_root` (directory or URL) is for new experiments of a database.
    """

    tracking_uri: str
    artifact_root: str
    experiment: str

    @contextmanager
    def connected(self) -> Iterator[Runs]:
        """The experiment, made if missing. Raises UsageError for an unusable URI or experiment,
        EvalError for a silent database, and what MLflow raises."""
        with bounded_and_quiet():
            location = artifact_location(self.tracking_uri, self.artifact_root)
            client = connect(self.tracking_uri)
            yield Runs(client, find_experiment(client, self.experiment, location))


def artifact_location(tracking_uri: str, artifact_root: str) -> str | None:
    """Artifact URL of a new experiment; None leaves it to a server."""
    if not _is_database(tracking_uri):
        return None
    # absolute, because the process that reads the run later has another working directory
    is_url = "://" in artifact_root
    return artifact_root if is_url else Path(artifact_root).expanduser().resolve().as_uri()


def connect(tracking_uri: str) -> MlflowClient:
    """A client of runs and registry. Raises EvalError for a database that cannot be opened; servers
    are asked by the first call."""
    from mlflow.tracking import MlflowClient

    if _is_database(tracking_uri):
        _require_database(tracking_uri)
    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def _require_database(uri: str) -> None:
    """Try once: MLflow would try ten times over 100 s and log each failure."""
    import sqlalchemy
    from sqlalchemy.exc import SQLAlchemyError

    url = sqlalchemy.make_url(uri)
    backend = url.get_backend_name()
    options = {"connect_timeout": DATABASE_TIMEOUT_S} if backend in ("postgresql", "mysql") else {}
    try:
        if backend == "sqlite" and url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        engine = sqlalchemy.create_engine(url, connect_args=options, poolclass=sqlalchemy.NullPool)
        sqlalchemy.inspect(engine).get_table_names()
    except (SQLAlchemyError, ImportError, OSError) as error:
        raise EvalError(
            f"cannot open the tracking database {url.render_as_string()}:"
            f" {str(error).splitlines()[0]}",
            "check tracking.uri, and that the driver it names is installed",
        ) from error


def find_experiment(client: MlflowClient, name: str, location: str | None) -> str:
    """Id of an experiment, made if missing. Raises UsageError where it was deleted."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(
                name, artifact_location=location, tags=experiment_tags()
            )
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another process was first
            assert found is not None
    if found.lifecycle_stage != "active":
        raise UsageError(
            f"MLflow experiment {name!r} is deleted",
            f"restore it (mlflow experiments restore -x {found.experiment_id}) or set another"
            " tracking.experiment",
        )
    for tag, view in view_tag(SCORES, ALL_RUNS).items():
        if found.tags.get(tag) != view:  # another version of concur has written it
            client.set_experiment_tag(found.experiment_id, tag, view)
    return str(found.experiment_id)


def is_only(client: MlflowClient, experiment_id: str) -> bool:
    """Whether the page of all runs would show less than two."""
    return len(client.search_runs([experiment_id], PARENTS, max_results=2)) < 2


def try_mlflow(
    tracking_uri: str,
    write: Callable[[], T],
    *,
    log: Callable[[str], None],
    failed: Callable[[str], None],
) -> T | None:
    """Return what an idempotent `write` returns, calling it again while a tracking server is away.

    An error becomes one line for `failed`, and None is returned.
    """
    served = tracking_uri.startswith(("http://", "https://"))
    try:
        return retry_until_back(
            write,
            service=f"MLflow at {tracking_uri}",
            is_absent=lambda error: served and _is_absent(error),
            log=log,
            deadline_s=BACK_S,
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {cause_of(error)}"
        failed(f"MLflow was not written ({reason}); the same command writes it")
        return None


def _is_absent(error: BaseException) -> bool:
    """Whether no server answered: every answer is a RestException."""
    from mlflow.exceptions import MlflowException, RestException
    from requests import exceptions as requests

    if isinstance(error, RestException):
        return False
    # MLflow's client wraps connection errors and time-outs of requests in this code
    wrapped = isinstance(error, MlflowException) and error.error_code == "INTERNAL_ERROR"
    return wrapped or isinstance(
        error, ConnectionError | requests.ConnectionError | requests.Timeout
    )
