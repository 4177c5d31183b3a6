"""How much of a vLLM server's speed our client takes: tokens a second against `vllm bench serve`,
same prompts, same server, same call.

    CONCUR_VLLM_PYTHON=PYTHON python -m benchmarks.serving --requests 512 --max-tokens 384 --out DIR

Starts one server with the command of `synthesis.sampler: vllm`, with dummy weights in the shape of
--shape and a tokenizer trained here whose vocabulary is as large as the model's; its GPUs are those
that are visible, which no Ray hands out. All prompts, of the bundled tasks, are asked once for a
few tokens, so that every round finds them in the prefix cache; then rounds of the two clients
alternate. A round's tokens a second are all tokens of its answers over the time from its first
request to its last answer. `vllm bench serve` runs twice: with a seed in each request, as ours are,
and without one, which tells what seeds cost. Says nothing about the quality of the text: there is
none.
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

from benchmarks.shapes import QWEN_0_5B, QWQ_32B, ROPE_THETA
from kernels_eval.devices import visible_gpus
from kernels_eval.errors import EvalError
from kernels_eval.records import KernelTask, Language, SamplingParams
from tasks.sources import bundled
from tasks.sources.small_model import MARKER, build_small_model
from tasks.synthesis import sizing
from tasks.synthesis.client import OpenAISampler
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.prompts import render
from tasks.synthesis.sampler import Request
from tasks.synthesis.server import ANSWER_TIMEOUT_S, ASK_AHEAD, CPU_MEMORY, options, serve_command
from tasks.synthesis.vllm import VllmServer

PER_TASK = 32
"""Few tasks with many samples: their prompts all fit into the prefix cache of one GPU beside what
is written."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwq-32b": {**QWQ_32B, "rope_theta": ROPE_THETA},
    "qwen-0.5b": {**QWEN_0_5B, "rope_theta": ROPE_THETA},
    "small": {},
}
NAME, KEY = "dummy", "of-this-benchmark"
TEMPERATURE, TOP_P = 0.9, 1.0
"""Kevin-32B's (tasks.synthesis.known_models)."""
WARM_TOKENS = 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    parser.add_argument("--rounds", default="bench,ours,bench-unseeded,ours", help="in this order")
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
    tasks = bundled.load("all")[: -(-arguments.requests // PER_TASK)]
    prompts = [render(task, Language.CUDA) for task in tasks]
    model = Path(arguments.model or model_directory(out / "model", arguments.shape, prompts))
    config = ServerConfig(args=("--load-format", "dummy", *arguments.server_arg))
    sizes, gpus = [sizing.size_of(prompt) for prompt in prompts], len(visible_gpus())
    size = sizing.server_size(str(model), config, gpus, sizes, arguments.max_tokens)
    command = [*serve_command(config), str(model), *options(config, NAME, None, size)]
    env = {"VLLM_API_KEY": KEY} | ({} if gpus else CPU_MEMORY)
    print(size.in_words(), flush=True)
    rows, started = [], time.monotonic()
    with VllmServer(command, env, out.absolute() / "vllm.log") as server:
        client = OpenAISampler(
            f"{server.address}/v1",
            NAME,
            concurrency=int(size.replicas * size.max_num_seqs * ASK_AHEAD),
            timeout_s=ANSWER_TIMEOUT_S,
            api_key=KEY,
            direct=True,
        )
        ours(client, asked(tasks, prompts, arguments.requests, WARM_TOKENS))
        print(
            f"server started, and every prompt seen: {time.monotonic() - started:.0f} s", flush=True
        )
        for name in arguments.rounds.split(","):
            requests = asked(tasks, prompts, arguments.requests, arguments.max_tokens)
            if name == "ours":
                row = ours(client, requests)
            else:
                row = bench(client, server, model, requests, name == "bench", out)
            rows.append({"client": name, **row})
            print(json.dumps(rows[-1]), flush=True)
            (out / "serving.json").write_text(json.dumps(rows, indent=1))
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


def ours(client: OpenAISampler, requests: list[Request]) -> dict[str, Any]:
    started, tokens, answers = time.monotonic(), 0, 0
    for response in client.sample(requests):
        tokens, answers = tokens + (response.completion_tokens or 0), answers + 1
    passed_s = time.monotonic() - started
    return {
        "requests": answers,
        "tokens": tokens,
        "seconds": round(passed_s, 2),
        "tokens_per_s": round(tokens / passed_s, 1),
    }


def bench(
    client: OpenAISampler,
    server: VllmServer,
    model: Path,
    requests: list[Request],
    seeded: bool,
    out: Path,
) -> dict[str, Any]:
    """`vllm bench serve` with the same prompts in the same order, as many in flight as ours. Raises
    EvalError where it fails."""
    prompts = out / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": request.prompt}) + "\n" for request in requests),
        encoding="utf-8",
    )
    settings = {
        "--backend": "openai-chat",
        "--base-url": server.address,
        "--endpoint": "/v1/chat/completions",
        "--model": str(model),
        "--served-model-name": NAME,
        "--dataset-name": "custom",
        "--dataset-path": str(prompts),
        "--num-prompts": str(len(requests)),
        "--custom-output-len": str(requests[0].sampling.max_tokens),
        "--max-concurrency": str(client.concurrency),
        "--temperature": str(TEMPERATURE),
        "--top-p": str(TOP_P),
        "--result-dir": str(out),
        "--result-filename": "bench.json",
    }
    if seeded:
        settings["--extra-body"] = json.dumps({"seed": 1})
    words = [*serve_command(ServerConfig())[:-1], "bench", "serve"]
    words += ["--disable-tqdm", "--save-result", "--skip-chat-template", "--disable-shuffle"]
    for name, value in settings.items():
        words += [name, value]
    done = subprocess.run(
        words, env=os.environ | {"OPENAI_API_KEY": KEY}, capture_output=True, text=True
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
