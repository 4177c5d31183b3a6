"""Tokens per second of LoRA training: TRL's defaults against `tasks.training.acceleration`, in one
call through the same SFTTrainer.

    python -m benchmarks.training_speed --shape qwq --variants trl,ours --lengths 8192,16384 \\
        --steps 20 --out results.json
    python -m benchmarks.training_speed --shape tiny   # the same on a CPU in under a minute

A model of QwQ-32B's shape with random bfloat16 weights made on the device (needs 66 GB for them),
LoRA of rank 32 with alpha 32 and dropout 0.05 on the seven projections, AdamW, one row a step. Rows
are seeded, of one length, their last 80 % carry loss, and two of them take turns, so that there is
something to learn and losses can be compared. Each variant runs in a process of its own: one that
fails costs nothing but itself. The first three steps are left out of the median. Peaks are torch's,
allocated and reserved.

MFU is the model's FLOPs, recomputation not counted (tasks.training.telemetry, with the source),
over peak FLOP/s: 989e12, dense bfloat16 of an H200 SXM by its data sheet; the second figure is
against the 790e12 that large bfloat16 products reach on one.

Peers at `--gpus N`: `trl` and `liger` (package liger-kernel) with DDP, `trl_fsdp2` and
`liger_fsdp2` with FSDP2 as in training, beside `ours` and `ours_fsdp2`. For FSDP2 the first process
holds the weights in main memory, as in training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.training_subject import (
    COMPLETION_SHARE,
    SHAPES,
    adapter_config,
    dataset,
    random_model,
    rows,
    tokenizer,
)
from benchmarks.training_tables import table
from tasks.training import recipe
from tasks.training.telemetry import TrainingFlops

# what training with `parallelism: fsdp2` gives transformers (a test compares them)
FSDP2: dict[str, Any] = {"gradient_checkpointing": True, **recipe.FSDP2}
OURS_FSDP2 = {**FSDP2, "gradient_checkpointing": False}
# options of AccelerationOptions for ours; None is TRL, with the SFTConfig arguments beside it
VARIANTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "trl": (None, {}),
    "trl_float32": (
        None,
        {"bf16": False},
    ),  # the arbiter: weights and arithmetic in float32, for what rounding does to the others
    "liger": (None, {"use_liger_kernel": True}),
    "trl_fsdp2": (None, FSDP2),
    "liger_fsdp2": (None, {**FSDP2, "use_liger_kernel": True}),
    "ours": ({}, {}),
    "ours_fsdp2": ({}, OURS_FSDP2),
    "ours_fsdp2_recomputed": ({"host_memory_gb": 0}, OURS_FSDP2),
    "ours_layer": ({"recompute": "layer"}, {}),
    "ours_eager": ({"compile": False}, {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--variants", default="trl,ours", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument(
        "--lengths", default=None, help="tokens per row; default 8192,16384, or 96 for tiny"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--passes", type=int, default=1, help="of each GPU, a row each, for an optimiser step"
    )
    parser.add_argument(
        "--dropout", type=float, default=0.05, help="0: losses of all variants agree to rounding"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="processes with rows of their own, each with the whole model (DDP), or with its share"
        " for the variants of FSDP2, which need two or more",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=240,
        help="a variant stops after the step that passes this",
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON, written after every variant")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(json.loads(arguments.child))
    lengths = [
        int(length)
        for length in (
            arguments.lengths or ("96" if arguments.shape == "tiny" else "8192,16384")
        ).split(",")
    ]
    variants = arguments.variants.split(",")
    if unknown := set(variants) - set(VARIANTS):
        parser.error(f"no variant {', '.join(sorted(unknown))}: {', '.join(VARIANTS)}")
    if arguments.gpus == 1 and any(VARIANTS[name][1].get("fsdp") for name in variants):
        parser.error("FSDP2 shares a model among several: give --gpus 2 or more")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Run(arguments, variant, length, folder) for length in lengths for variant in variants
        ]
        for index, run in enumerate(runs):
            run.start()
            if index + 1 < len(runs) and arguments.gpus == 1:
                runs[index + 1].prepare()  # imports, while this one holds the GPU
            results.append(run.result())
            print(json.dumps(results[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1))
    print("\n" + table(results))
    return 0 if all("error" not in result for result in results) else 1


class Run:
    """One variant in its own process; its result is what it wrote until it ended, however it
    ended."""

    def __init__(
        self, arguments: argparse.Namespace, variant: str, length: int, folder: str
    ) -> None:
        self.variant, self.length, self.budget_s = variant, length, arguments.budget_s
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
        # beside the results, so that a run that is killed from outside leaves the steps it made
        self.report = Path(
            arguments.out.parent if arguments.out else folder, f"{variant}-{length}.json"
        )
        self.log = Path(folder, f"{variant}-{length}.log")
        self.report.unlink(missing_ok=True)
        self.order = dict(
            shape=arguments.shape,
            variant=variant,
            length=length,
            steps=arguments.steps,
            passes=arguments.passes,
            dropout=arguments.dropout,
            gpus=arguments.gpus,
            budget_s=arguments.budget_s,
            report=str(self.report),
        )
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """The process starts, imports and waits."""
        environment = {
            **os.environ,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [
            sys.executable,
            "-m",
            "benchmarks.training_speed",
            "--child",
            json.dumps(self.order),
        ]
        if self.order["gpus"] > 1:
            launcher = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={self.order['gpus']}",
            ]
            command = [sys.executable, *launcher, *command[1:]]
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def start(self) -> None:
        if self.process is None:
            self.prepare()
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def result(self) -> dict[str, Any]:
        error = None
        try:
            if code := self.process.wait(timeout=self.budget_s + 60):
                error = f"exit status {code}"
        except subprocess.TimeoutExpired:
            error = "stopped: past its budget"
            self.process.kill()
            self.process.wait()
        empty = {"variant": self.variant, "length": self.length, "losses": [], "step_s": []}
        result = json.loads(self.report.read_text()) if self.report.exists() else empty
        if error:
            print(
                f"--- {self.variant} at {self.length}: {error}\n"
                + head_and_tail(self.log.read_text()),
                flush=True,
            )
            result.setdefault("error", error)
        return result


def head_and_tail(text: str) -> str:
    """A traceback's cause is at its end, what went before often at the start of a log."""
    return text if len(text) <= 6000 else f"{text[:3000]}\n[...]\n{text[-3000:]}"


# -- the measured process --------------------------------------------------------------------------


def child(order: dict[str, Any]) -> int:
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    import tasks.training.acceleration.layers  # noqa: F401

    if order["gpus"] == 1:  # torchrun hands no input on
        sys.stdin.readline()
    started = time.monotonic()
    report = {
        "variant": order["variant"],
        "length": order["length"],
        "gpus": order["gpus"],
        "passes": order["passes"],
        "dropout": order["dropout"],
        "losses": [],
        "step_s": [],
    }
    try:
        train(order, report, started)
    except BaseException as error:
        report["error"] = f"{type(error).__name__}: {str(error)[:600]}"
        traceback.print_exc()
    write(order, report)
    return 1 if "error" in report else 0


def write(order: dict[str, Any], report: dict[str, Any]) -> None:
    if int(os.environ.get("RANK", "0")) > 0:
        return
    temporary = Path(order["report"] + ".new")
    temporary.write_text(json.dumps(report))
    temporary.replace(order["report"])


def train(order: dict[str, Any], report: dict[str, Any], started: float) -> None:
    import torch
    from transformers import PrinterCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from tasks.training.acceleration.layers import (
        Acceleration,
        AccelerationOptions,
        accelerate_trainer,
    )

    gpu = torch.cuda.is_available()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    options, extra = VARIANTS[order["variant"]]
    shape = SHAPES[order["shape"]]
    # FSDP2 takes the weights of the first process in main memory, as in training
    sharded = "fsdp" in extra
    place = torch.device("cpu") if sharded else device
    model = random_model(shape, device, place, drawn=rank == 0 or not sharded)
    if extra.get("bf16") is False:
        model = model.float()
    report["versions"] = versions()
    report["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=order["passes"],
            num_train_epochs=1,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            bf16=gpu,
            use_cpu=not gpu,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},  # the rows are tokens and labels already
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
            dataloader_pin_memory=gpu,
            ddp_find_unused_parameters=False,
        )
        if options is not None:
            settings["gradient_checkpointing"] = False
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**{**settings, **extra}),
            train_dataset=dataset(
                rows(
                    order["length"],
                    shape["vocab_size"],
                    order["steps"] * order["gpus"] * order["passes"],
                )
            ),
            processing_class=tokenizer(shape["vocab_size"]),
            peft_config=adapter_config(order["dropout"]),
            callbacks=[stopwatch(order, report, started)],
        )
        trainer.remove_callback(PrinterCallback)
        flops = TrainingFlops.of(trainer.model, COMPLETION_SHARE)
        report["flops_per_token"] = flops.row(order["length"]) / order["length"]
        if options is not None:

            def note(made: Acceleration) -> None:
                report["plan"] = made.plan.describe()
                report["estimated_peak_gb"] = made.plan.peak_bytes / 1e9
                report["attention"] = made.attention_name
                report["attention_ms"] = made.attention_ms

            accelerate_trainer(
                trainer,
                tokens=order["length"],
                seed=0,
                sharded=sharded,
                options=AccelerationOptions(**options),
                made=note,
            )
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        report["setup_s"] = time.monotonic() - started
        write(order, report)
        trainer.train()
        report["compiled_codes"] = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


def stopwatch(order: dict[str, Any], report: dict[str, Any], started: float) -> Any:
    """Seconds, loss and peaks of every step into the report, which is written each time."""
    import torch
    from transformers import TrainerCallback

    gpu = torch.cuda.is_available()

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun = self.now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report["step_s"].append(self.now() - self.begun)
            if gpu:
                report["peak_allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
                report["peak_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
            report["elapsed_s"] = time.monotonic() - started
            write(order, report)
            if report["elapsed_s"] > order["budget_s"]:
                control.should_training_stop = True

        def on_log(
            self,
            args: Any,
            state: Any,
            control: Any,
            logs: dict[str, float] | None = None,
            **kwargs: Any,
        ) -> None:
            if logs and "loss" in logs:
                report["losses"].append(logs["loss"])
                report.setdefault("grad_norms", []).append(logs.get("grad_norm"))

        def now(self) -> float:
            if gpu:
                torch.cuda.synchronize()
            return time.perf_counter()

    return Stopwatch()


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "peft", "trl", "accelerate")}


if __name__ == "__main__":
    sys.exit(main())
