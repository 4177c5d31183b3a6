"""Where training runs: one Ray task, or Ray Train workers on one or many nodes.

Guarantees: live logs in the caller's thread; no process survives an interrupted caller; a lost
worker restarts its group from the newest checkpoint, whose later steps are logged again. Paths must
mean the same on every node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, cast

from kernels_eval.errors import EvalError, UsageError, cause_of
from kernels_eval.pool.ray import interruptible, start_ray
from kernels_eval.sandbox.trees import remove_tree
from tasks.training.formatting import Rows
from tasks.training.recipe import TrainingRecipe
from tasks.training.result import TrainingResult

RESTARTS = 3
"""Restarts of a group of workers in one call before the fault is raised."""
STARTS = 10
"""Approximate minutes that a group waits for devices held by others."""
ABORT_S = 120.0
"""Seconds that ending a group may take: a starting group ends once it has started."""
OnLog = Callable[[dict[str, float]], None]
RESUMES = "run it again to resume from the last checkpoint"


class Job(NamedTuple):
    """What every worker needs. Paths are absolute: each worker has its own working directory."""

    rows: Rows
    recipe: TrainingRecipe
    base_model_dir: str
    out_dir: Path
    called_from: Path

    def train(self, on_log: OnLog | None) -> TrainingResult:
        # Ray's workers look there first: a kernels.py would be imported in place of a package
        sys.path[:] = [path for path in sys.path if path != str(self.called_from)]
        from tasks.training.trainer import train

        return train(self.rows, self.recipe, self.base_model_dir, self.out_dir, on_log)


def train_on_ray(
    rows: Rows,
    recipe: TrainingRecipe,
    base_model_dir: str | Path,
    out_dir: Path,
    on_log: OnLog | None = None,
) -> TrainingResult:
    """Run `train` on the cluster: each worker on a GPU where the cluster has any, else on a CPU
    core. Logs reach `on_log` in the caller's thread as they happen.

    One worker is a plain Ray task, which starts in 2 s; several are a TorchTrainer (17 to 22 s).
    Without a connection, joins $RAY_ADDRESS or starts Ray. Raises what `train` and `start_ray`
    raise, UsageError for too few devices, EvalError where workers die.
    """
    import ray
    from ray.exceptions import RayError

    start_ray()
    gpu = _on_gpus(recipe, ray.cluster_resources())
    base = Path(base_model_dir).expanduser()
    # a hub id stays as it is
    where = str(base.absolute()) if base.exists() else str(base_model_dir)
    job = Job(rows, recipe, where, Path(out_dir).absolute(), Path.cwd())
    alone = recipe.workers == 1
    task = ray.remote(_events).options(
        num_cpus=_free_cores(gpu) if alone else 0,  # several: this task only drives them
        num_gpus=int(alone and gpu),
        num_returns="streaming",
        max_retries=0,
    )
    events: Any = task.remote(job, gpu)  # a generator of references
    controller = None
    try:
        while True:
            with interruptible():
                reference = next(events, None)
                if reference is None:
                    break
                kind, value = ray.get(reference)
            if kind == "result":
                return cast(TrainingResult, value)
            if kind == "failure":
                raise value
            if kind == "controller":
                controller = value
            elif on_log is not None:
                on_log(value)
    except RayError as error:
        raise EvalError(
            f"the Ray worker of the training died: {type(error).__name__}",
            f"often the machine ran out of memory: free some or lower batch_size; {RESUMES}",
        ) from error
    except BaseException:
        # an interrupted caller, or one worker's failure, must not leave the others behind
        _end(events, controller)
        raise
    raise EvalError("the Ray worker of the training ended without a result", RESUMES)


def _on_gpus(recipe: TrainingRecipe, resources: Mapping[str, float]) -> bool:
    """Raises UsageError for too few devices: Ray would wait silently."""
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    have, kind = (gpus, "GPUs") if gpus else (cpus, "CPU cores and no GPU")
    if recipe.workers > max(have, 1):
        raise UsageError(
            f"the recipe trains with {recipe.workers} workers and the Ray cluster has {have}"
            f" {kind}",
            f"set workers to {have} at most, or join more nodes (`ray start --address=...`) and"
            " wait until `ray status` lists them",
        )
    return gpus > 0


def _free_cores(gpu: bool) -> int:
    import ray

    if gpu:
        return 1
    free = int(ray.available_resources().get("CPU", 1))
    return max(1, min(free, len(os.sched_getaffinity(0))))


def _end(events: Any, controller: Any) -> None:
    """A group's controller must free its devices, which Ray would hold until we exit."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        if controller is not None:
            ray.get(controller.abort.remote(), timeout=ABORT_S)
    except (RayError, GetTimeoutError):
        pass  # it ends its own process with the call
    finally:
        ray.cancel(events, force=True)


def _events(job: Job, gpu: bool) -> Iterator[tuple[str, Any]]:
    from ray.util.queue import Queue

    alone = job.recipe.workers == 1
    news: Any = SimpleQueue() if alone else Queue(actor_options={"num_cpus": 0})
    run = _alone if alone else _fit
    Thread(target=run, args=(job, gpu, news), daemon=True).start()
    failure: EvalError | None = None
    while True:
        kind, value = news.get()
        if kind == "failed" and not isinstance(value, UsageError):
            failure = value  # Ray Train starts the group again, and has the last word
        elif kind in ("failed", "end"):
            gone = failure or EvalError(f"the workers of the training died: {value}", RESUMES)
            yield "failure", value if kind == "failed" else gone
        else:
            yield kind, value
        if kind == "result":
            return


def _alone(job: Job, gpu: bool, news: Any) -> None:
    try:
        news.put(("result", job.train(lambda entry: news.put(("log", entry)))))
    except BaseException as error:
        reason = EvalError(f"training failed on its Ray worker: {error!r}", RESUMES)
        news.put(("failed", error if isinstance(error, EvalError) else reason))
        news.put(("end", ""))


def _fit(job: Job, gpu: bool, news: Any) -> None:
    import ray

    # it also takes what is printed into a file, which `datasets` hashes
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    # Ray Train's own notes: checkpoints are ours and lie beside it
    scratch = job.out_dir / "ray_train"
    try:  # from its first import on: who waits for news would wait for ever
        from ray.train.torch import TorchConfig
        from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig

        trainer = _trainer_class()(
            _worker,
            train_loop_config={"job": ray.put(job), "news": news},
            torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=job.recipe.workers,
                use_gpu=gpu,
                resources_per_worker={"CPU": 1, "GPU": 1} if gpu else {"CPU": 1},
            ),
            run_config=RunConfig(
                name="run",
                storage_path=str(scratch),
                callbacks=[_announcement(news)],
                failure_config=FailureConfig(
                    max_failures=RESTARTS, controller_failure_limit=STARTS
                ),
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        )
        last = "result", trainer.fit().return_value
    # of Ray's: what the workers said of themselves is in the queue already
    except Exception as error:
        last = "end", cause_of(error)
    remove_tree(scratch)
    news.put(last)


def _trainer_class() -> Any:
    """TorchTrainer without the placement-group actor, which never ends without a dashboard."""
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            return [
                each
                for each in super()._create_default_callbacks()
                if not isinstance(each, PlacementGroupCleanerCallback)
            ]

    return Trainer


def _announcement(news: Any) -> Any:
    """Give the caller the controller's handle, needed to end a group in order."""
    import ray
    from ray.train.v2._internal.execution.callback import ControllerCallback

    class Announcement(ControllerCallback):
        def after_controller_start(self, train_run_context: Any) -> None:
            news.put(("controller", ray.get_runtime_context().current_actor))

    return Announcement()


def _worker(config: dict[str, Any]) -> TrainingResult:
    import ray

    news = config["news"]
    try:
        job: Job = ray.get(config["job"])
        return job.train(lambda entry: news.put(("log", entry)))
    except EvalError as error:
        news.put(("failed", error))
        raise
