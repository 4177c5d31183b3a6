"""Commands that train models and compare training sets."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Literal

from flows.cli import pages
from flows.cli.common import INTERRUPTED, Curated, Group, Json, Root, command, setting, tell
from kernels_eval.errors import UsageError


@command(Group.TRAIN, needs=["train"])
def train(
    *,
    root: Root = ".concur",
    curated: Curated = None,
    profile: str = "local",
    overrides: list[str] = setting("the profile", "training.num_epochs=1"),
    merged: Path | None = None,
    merged_dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> Json:
    """Train an adapter on an existing curated set; print its path and its run in MLflow.

    If the training is stopped, rerun the same command to resume it.

    Options:
        profile: The profile whose `training` and `tracking` are used.
        merged DIR: Merge base and adapter into one model there, if the check passes.
        merged_dtype: Data type of the merged weights.
    """
    from flows.config import load_profile
    from flows.launch import embed, served_and_shown
    from flows.stack.control import join_stack
    from tasks.publishing.lineage import find_curated

    join_stack(root)
    given = load_profile(profile, overrides)
    if merged and merged.exists():  # now, and not after hours of training
        raise UsageError(f"{merged} exists", "give a new directory for the merged weights")
    place = find_curated(root, curated).root
    embed(given.model_copy(update={"root": place}))  # before prefect is imported
    from flows.track import model_version_of
    from flows.train import merge_trained, of_line, summary_of, train_and_track

    config, tasks, found = of_line(root, curated, given)
    with served_and_shown() as progress:
        trained, run_id = train_and_track(config, tasks, found)
    summary = summary_of(config, found, trained) | {
        "new_work": "training" in progress.worked,
        "seconds": progress.seconds,
        "mlflow": run_id,
        "model_version": run_id and model_version_of(config, run_id),
    }
    if merged:
        summary["merged"] = merge_trained(config, tasks, found, trained, merged, merged_dtype)
    summary["serve"] = (
        f"vllm serve {summary['base_model']} --enable-lora --max-lora-rank {summary['rank']}"
        f" --lora-modules tuned={summary['adapter']}"
    )
    return summary


@command(Group.TRAIN, needs=["train"])
def reinforce(
    *,
    root: Root = ".concur",
    training: str | None = None,
    profile: str = "local",
    overrides: list[str] = setting("the profile", "reinforcement.steps=20"),
) -> Json:
    """Improve a trained adapter with rewards from the verifier (GRPO); print where it is.

    Rerun the same command to resume one that was stopped.

    Options:
        training SNAPSHOT: A finished training: fingerprint or directory. [default: the newest]
        profile: The profile whose `reinforcement`, `verification` and `tracking` are used.
    """
    from flows.launch import joined_configuration, served_and_shown

    given = joined_configuration(profile, overrides, root)
    from flows.reinforce import of_training, reinforce_and_track, summary_of

    config, tasks, trained = of_training(given, training)
    with served_and_shown() as progress:
        reinforced, run_id = reinforce_and_track(config, tasks, trained)
    summary = summary_of(trained, reinforced)
    return summary | {"seconds": progress.seconds, "mlflow": run_id}


@command(Group.TRAIN, needs=["train"], succeeded="complete", page=pages.of_ablation)
def ablate(
    *,
    profile: str | None = None,
    overrides: list[str] = setting("the profile", "training.num_epochs=1"),
    strategies: str | None = None,
    sizes: str | None = None,
    seeds: str | None = None,
    max_parallel_branches: int | None = None,
    verdicts: str | None = None,
) -> Json:
    """Compare strategies: curate, train and benchmark each, at every size and with every seed.

    Rerun the same command to resume a stopped ablation and to retry failed branches. The exit
    status is 1 if a branch failed.

    Options:
        profile: A profile's name, or the path of a YAML file. [default: ablation]
        strategies S,S,...: Names, YAML files, or all. The first is the baseline.
        sizes N,N,...: Maximum numbers of samples; `all`: as the profile limits them. [default:
            all]
        seeds N,N,...: Seeds of curation, training and sampling. [default: 0,1]
        max_parallel_branches --parallel N: Number of parallel branches. [default: one per GPU]
        verdicts SNAPSHOT: Start from this verification snapshot. [default: refresh first]
    """
    from flows.ablation.plan import ablation_config, pipeline_of, planned_branches
    from flows.config import strategy_names
    from flows.launch import launch_ablation, require_ready
    from flows.lists import parsed_numbers
    from flows.stack.control import join_stack

    def limit(text: str) -> int | None:
        every = text.strip() == "all"
        return None if every else parsed_numbers(text, "--sizes", int, 1, "1000,all")[0]

    limits = None if sizes is None else list(dict.fromkeys(map(limit, sizes.split(","))))
    config = ablation_config(
        profile=profile,
        overrides=overrides,
        strategies=strategies and strategy_names([strategies]),
        sizes=limits,
        seeds=None if seeds is None else parsed_numbers(seeds, "--seeds", int, 0, "0,1,2"),
        max_parallel_branches=max_parallel_branches,
        verdicts=verdicts,
    )
    pipeline = pipeline_of(config)
    planned_branches(config, pipeline.curation)
    require_ready(pipeline, *(() if config.verdicts else ("refresh",)), "training", "benchmark")
    join_stack(pipeline.root)
    try:
        return launch_ablation(config, pipeline)
    except KeyboardInterrupt:
        # Branches work in threads that nothing can interrupt; what they finished is on disk. End
        # Ray and the embedded Prefect: the interpreter would wait for the threads.
        tell(INTERRUPTED)
        atexit._run_exitfuncs()
        os._exit(130)
