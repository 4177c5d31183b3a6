"""Where training runs: one Ray task on one device, or a group of Ray Train's workers on several, of
one node or of many.

Guarantees: logs reach the caller as they happen, in its own thread; an interrupted caller leaves no
process behind; a lost worker takes its group with it and the group resumes from the newest
checkpoint, a few times; what cannot get better by trying again (the rows, the model, too little
memory) ends the run at once, as the error that `trainer.train` raises; anything else is an
EvalError that says how to resume. Does not guarantee that paths mean the same on another node: the
snapshots' root must be a folder that all nodes share. After a restart the steps since the
checkpoint are logged once more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, cast

from kernels_eval.errors import EvalError, UsageError, cause_of
from kernels_eval.pool.ray import interruptible, start_ray
from tasks.training.formatting import Rows
from tasks.training.recipe import TrainingRecipe
from tasks.training.result import TrainingResult

RESTARTS = 3
"""Times that a group of workers is started again in one call before the fault is raised."""
STARTS = 10
"""Minutes, about, that a group waits for devices which others hold, before the fault is raised."""
ABORT_S = 120.0
"""How long the end of a group may take: one that is being started ends when it has started."""
OnLog = Callable[[dict[str, float]], None]
RESUMES = "run it again to resume from the last checkpoint"


class Job(NamedTuple):
    """What every worker needs, as it travels. Paths are absolute: a worker has a working directory
    of its own."""

    rows: Rows
    recipe: TrainingRecipe
    base_model_dir: str
    out_dir: Path

    def train(self, on_log: OnLog | None) -> TrainingResult:
        from tasks.training.trainer import train

        return train(*self, on_log)


def train_on_ray(
    rows: Rows,
    recipe: TrainingRecipe,
    base_model_dir: str | Path,
    out_dir: Path,
    on_log: OnLog | None = None,
) -> TrainingResult:
    """`train` on the cluster: each worker on a GPU where the cluster has any, else on a CPU core.
    Logs reach `on_log` in the caller's thread as they happen.

    One worker is a plain Ray task and not Ray Train's TorchTrainer, which with one worker adds a
    controller, a placement group and a process group, 17 to 22 s measured against 2 s, and no
    ability. Several are a TorchTrainer (NCCL on GPUs, gloo on CPUs), driven by such a task. Where
    no Ray is connected, joins the one that $RAY_ADDRESS names, or starts one here. `base_model_dir`
    and `out_dir` must mean the same on every node. Raises what `train` and `start_ray` raise,
    UsageError where the cluster has fewer devices than the recipe has workers, and EvalError where
    the worker processes die.
    """
    import ray
    from ray.exceptions import RayError

    start_ray()
    gpu = _on_gpus(recipe, ray.cluster_resources())
    base = Path(base_model_dir).expanduser()
    # a hub id stays as it is
    where = str(base.absolute()) if base.exists() else str(base_model_dir)
    job = Job(rows, recipe, where, Path(out_dir).absolute())
    alone = recipe.workers == 1
    task = ray.remote(_events).options(
        num_cpus=int(alone),  # several: this task only drives them
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
    """Whether workers get GPUs. Raises UsageError where there are too few devices: Ray would wait
    for more silently."""
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


def _end(events: Any, controller: Any) -> None:
    """End a run that has not ended by itself. A group's controller gives back its devices, which
    Ray would hold until this process ends."""
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
    """("log", entry) as training goes, then ("result", TrainingResult) or ("failure", error). A
    generator, so that Ray streams it.

    It trains by itself, or owns the group of workers that does: when its process ends, however it
    does, Ray ends theirs. A failure is an event, after which the caller ends this process: other
    workers may wait for the one that failed, and would not end by themselves.
    """
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
    shutil.rmtree(scratch, ignore_errors=True)
    news.put(last)


def _trainer_class() -> Any:
    """Ray Train's TorchTrainer without the actor that outlives it to remove its placement group.

    That one asks the dashboard whether the controller lives, and where there is no dashboard stays
    for ever. `_end` does its work.
    """
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
    """Tells the caller the controller's handle, by which alone a group can be ended in good
    order."""
    import ray
    from ray.train.v2._internal.execution.callback import ControllerCallback

    class Announcement(ControllerCallback):
        def after_controller_start(self, train_run_context: Any) -> None:
            news.put(("controller", ray.get_runtime_context().current_actor))

    return Announcement()


def _worker(config: dict[str, Any]) -> TrainingResult:
    """In each worker's process. Ray has set RANK, WORLD_SIZE and the process group, which is where
    transformers looks."""
    import ray

    news = config["news"]
    try:
        job: Job = ray.get(config["job"])
        return job.train(lambda entry: news.put(("log", entry)))
    except EvalError as error:
        news.put(("failed", error))
        raise
