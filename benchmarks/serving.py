"""How much of a vLLM server's speed our client takes: tokens a second against `vllm bench serve`,
same prompts, same server, same call.

    python -m benchmarks.serving --tasks kernelbench.parquet --requests 512 --max-tokens 384 --out
    DIR

Starts one server as `synthesis.sampler: vllm` does (CONCUR_VLLM_PYTHON names the environment), with
dummy weights in the shape of --shape and a tokenizer trained here whose vocabulary is as large as
the model's. All prompts are asked once for a few tokens, so that every round finds them in the
prefix cache; then rounds of the two clients alternate. A round's tokens a second are all tokens of
its answers over the time from its first request to its last answer. `vllm bench serve` runs twice:
with a seed in each request, as ours are, and without one, which tells what seeds cost. Says nothing
about the quality of the text: there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import QWQ_32B, ROPE_THETA
from kernels_eval.errors import EvalError
from kernels_eval.records import KernelTask, Language, SamplingParams
from tasks.sources.config import TasksConfig
from tasks.sources.small_model import MARKER, build_small_model
from tasks.sources.stage import load_tasks
from tasks.synthesis import sizing
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.prompts import render
from tasks.synthesis.sampler import Request
from tasks.synthesis.server import VllmSampler

PER_TASK = 16
"""Few tasks with many samples: their prompts all fit into the prefix cache of one GPU beside what
is written."""
SHAPES: dict[str, dict[str, Any]] = {"qwq-32b": {**QWQ_32B, "rope_theta": ROPE_THETA}, "small": {}}
NAME = "dummy"
TEMPERATURE, TOP_P = 0.9, 1.0
"""Kevin-32B's (tasks.synthesis.known_models)."""
WARM_TOKENS = 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", required=True, help="KernelBench tasks, Parquet: their prompts are asked"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwq-32b")
    parser.add_argument(
        "--model",
        help=(
            "a directory with config.json and tokenizer instead: what an earlier call wrote to"
            " OUT/model"
        ),
    )
    parser.add_argument("--requests", type=int, default=512, help=f"{PER_TASK} for each task")
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="sequences that the server writes at once"
    )
    parser.add_argument("--rounds", default="bench,ours,bench-unseeded,ours", help="in this order")
    parser.add_argument(
        "--server-env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="further environment of the server",
    )
    parser.add_argument(
        "--server-arg", action="append", default=[], help="further arguments of vllm serve"
    )
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    try:
        rows = compare(arguments)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(rows)
    return 0


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a round; written to --out after each, so that a run that is cut off leaves what it
    measured."""
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    tasks = load_tasks(TasksConfig(source="kernelbench", location=arguments.tasks))[
        : -(-arguments.requests // PER_TASK)
    ]
    prompts = [render(task, Language.CUDA) for task in tasks]
    model = (
        Path(arguments.model)
        if arguments.model
        else model_directory(out / "model", arguments.shape, prompts)
    )
    config = ServerConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=sizing.model_len(
            sizing.prompt_tokens(list(map(sizing.size_of, prompts)))[0], arguments.max_tokens, None
        ),
        env=dict(pair.split("=", 1) for pair in arguments.server_env),
        args=("--load-format", "dummy", *arguments.server_arg),
        restarts=0,
    )
    sampler, rows, started = (
        VllmSampler(str(model), NAME, config, logs=out / "logs"),
        [],
        time.monotonic(),
    )
    try:
        for _ in sampler.sample(asked(tasks, prompts, arguments.requests, WARM_TOKENS)):
            pass
        print(
            f"server started, and every prompt seen: {time.monotonic() - started:.0f} s", flush=True
        )
        for name in arguments.rounds.split(","):
            requests = asked(tasks, prompts, arguments.requests, arguments.max_tokens)
            row = (
                ours(sampler, requests)
                if name == "ours"
                else bench(sampler, model, requests, name == "bench", out)
            )
            rows.append({"client": name, **row})
            print(json.dumps(rows[-1]), flush=True)
            (out / "serving.json").write_text(json.dumps(rows, indent=1))
    finally:
        sampler.close()
    return rows


def asked(
    tasks: list[KernelTask], prompts: list[str], count: int, max_tokens: int
) -> list[Request]:
    """`PER_TASK` requests for each task, one after the other, each with a seed of its own."""
    return [
        Request(
            request_key=f"{task.task_id}#{index}",
            task=task,
            language=Language.CUDA,
            prompt=prompt,
            sample_index=index,
            sampling=SamplingParams(
                temperature=TEMPERATURE, top_p=TOP_P, max_tokens=max_tokens, seed=index
            ),
        )
        for task, prompt in zip(tasks, prompts, strict=True)
        for index in range(PER_TASK)
    ][:count]


def ours(sampler: VllmSampler, requests: list[Request]) -> dict[str, Any]:
    started, tokens, answers = time.monotonic(), 0, 0
    for response in sampler.sample(requests):
        tokens, answers = tokens + (response.completion_tokens or 0), answers + 1
    passed_s = time.monotonic() - started
    return {
        "requests": answers,
        "tokens": tokens,
        "seconds": round(passed_s, 2),
        "tokens_per_s": round(tokens / passed_s, 1),
    }


def bench(
    sampler: VllmSampler, model: Path, requests: list[Request], seeded: bool, out: Path
) -> dict[str, Any]:
    """`vllm bench serve` with the same prompts in the same order, as many in flight as ours. Raises
    EvalError where it fails."""
    assert sampler.server, "the server has answered before"
    python, key = os.environ["CONCUR_VLLM_PYTHON"], sampler.api_key
    prompts = out / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": request.prompt}) + "\n" for request in requests),
        encoding="utf-8",
    )
    words = [
        python,
        "-m",
        "vllm.entrypoints.cli.main",
        "bench",
        "serve",
        "--backend",
        "openai-chat",
        "--disable-tqdm",
        "--save-result",
    ]
    words += [
        "--base-url",
        sampler.server.address,
        "--endpoint",
        "/v1/chat/completions",
        "--model",
        str(model),
    ]
    words += [
        "--served-model-name",
        NAME,
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(prompts),
        "--skip-chat-template",
    ]
    words += [
        "--disable-shuffle",
        "--num-prompts",
        str(len(requests)),
        "--custom-output-len",
        str(requests[0].sampling.max_tokens),
    ]
    words += [
        "--max-concurrency",
        str(sampler.concurrency),
        "--temperature",
        str(TEMPERATURE),
        "--top-p",
        str(TOP_P),
    ]
    words += ["--result-dir", str(out), "--result-filename", "bench.json"]
    words += ["--extra-body", json.dumps({"seed": 1})] if seeded else []
    done = subprocess.run(
        words, env=os.environ | {"OPENAI_API_KEY": key}, capture_output=True, text=True
    )
    (out / "bench.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise EvalError(
            f"vllm bench serve failed: {done.stderr[-500:]}",
            f"see {out / 'bench.log'}; it needs pandas",
        )
    seen = json.loads((out / "bench.json").read_text())
    return {
        "requests": seen["completed"],
        "tokens": seen["total_output_tokens"],
        "seconds": round(seen["duration"], 2),
        "tokens_per_s": round(seen["output_throughput"], 1),
    }


def model_directory(directory: Path, shape: str, texts: list[str]) -> Path:
    """A model without weights: the small model's tokenizer and chat template with as many tokens as
    the shape has, and its config.json."""
    build_small_model(directory, texts)
    if not SHAPES[shape]:
        return directory
    config = json.loads((directory / "config.json").read_text())
    config = {
        key: value
        for key, value in config.items()
        if key not in ("layer_types", "rope_parameters", "max_window_layers", "head_dim")
    }
    (directory / "config.json").write_text(
        json.dumps({**config, **SHAPES[shape], "dtype": "bfloat16", "tie_word_embeddings": False})
    )
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary, taken = (
        tokenizer["model"]["vocab"],
        {token["id"] for token in tokenizer["added_tokens"]},
    )
    taken |= set(vocabulary.values())
    free = (number for number in range(SHAPES[shape]["vocab_size"]) if number not in taken)
    vocabulary |= {
        f"t{number}": number for number in free
    }  # no merge leads there: never read, and written as they are
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    (directory / MARKER).unlink()
    return directory


def report(rows: list[dict[str, Any]]) -> None:
    print(
        "| client | requests | tokens | seconds | tokens/s |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for row in rows:
        print(
            f"| {row['client']} | {row['requests']} | {row['tokens']} | {row['seconds']} |"
            f" {row['tokens_per_s']} |"
        )
    mean = {
        name: [row["tokens_per_s"] for row in rows if row["client"] == name]
        for name in ("ours", "bench", "bench-unseeded")
    }
    mean = {name: sum(values) / len(values) for name, values in mean.items() if values}
    for name in ("bench", "bench-unseeded"):
        if "ours" in mean and name in mean:
            print(f"ours / {name}: {mean['ours'] / mean[name]:.3f}")
    if len({row["tokens"] for row in rows}) > 1:
        print("Rounds differ in tokens: some answers ended early. Compare seconds too.")


if __name__ == "__main__":
    sys.exit(main())
