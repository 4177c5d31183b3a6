"""Tokens a second that vLLM writes in the middle of a night: as many sequences as fit, each
somewhere in its answer.

    CONCUR_VLLM_PYTHON -m benchmarks.decoding --weights fp8 --cache fp8 --gpus 2 --out DIR

Runs in vLLM's environment, with its offline engine and dummy weights in QwQ-32B's shape. Answers
are lognormal as in `benchmarks/night.toml` (`answer_tokens`, `sigma_tasks`, `sigma_answers`, cut at
`token_limit`). One that is being written is longer than answers are, since those are written for
longer: lengths are drawn with weights in proportion to themselves, and the place within evenly.
`--samples` sequences share the prompt of a task. All contexts are read first; then --tokens tokens
of each are timed. Says nothing about the quality of the text, nor about speculation, whose gain
depends on the text.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.shapes import QWQ_32B, ROPE_THETA

ANSWERS = 90_810
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HELD = 0.97
"""Of the room for keys and values: sequences that are ready go on while others are read."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--cache", choices=["auto", "fp8"], default="auto", help="auto: bf16")
    parser.add_argument("--gpus", type=int, default=1, help="of the one replica")
    parser.add_argument("--samples", type=int, default=5, help="answers that share a prompt")
    parser.add_argument("--tokens", type=int, default=192, help="timed of each sequence")
    parser.add_argument("--most", type=int, default=512, help="sequences")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = measured(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"{arguments.weights}-{arguments.cache}-{arguments.gpus}-{arguments.seed}.json"
    (arguments.out / name).write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return 0


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, read the contexts and time the tokens that follow."""
    from vllm import LLM, SamplingParams

    values = tomllib.loads(Path(__file__).with_name("night.toml").read_text("utf-8"))
    limit, prompt = values["token_limit"]["range"][0], values["prompt_tokens"]["range"][1]
    started = time.monotonic()
    engine = LLM(
        model=str(model_directory(arguments.out / "shape")),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        quantization="fp8" if arguments.weights == "fp8" else None,
        kv_cache_dtype=arguments.cache,
        tensor_parallel_size=arguments.gpus,
        max_model_len=limit + 2 * prompt,
        max_num_seqs=arguments.most,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=True,
        enforce_eager=arguments.eager,
        seed=arguments.seed,
    ).llm_engine
    ready_s = time.monotonic() - started
    cache = engine.vllm_config.cache_config
    room = cache.num_gpu_blocks * cache.block_size
    sequences = contexts(arguments, values, room)
    params = SamplingParams(
        temperature=0.9, max_tokens=prompt, ignore_eos=True, detokenize=False, seed=None
    )
    for number, tokens in enumerate(sequences):
        engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
    written, begun = dict.fromkeys(map(str, range(len(sequences))), 0), time.monotonic()
    while min(written.values()) == 0:
        step(engine, written)
    read_s, before, begun = time.monotonic() - begun, dict(written), time.monotonic()
    while min(written[name] - before[name] for name in written) < arguments.tokens:
        step(engine, written)
    passed_s = time.monotonic() - begun
    rate = (sum(written.values()) - sum(before.values())) / passed_s
    answer = values["answer_tokens"]["range"][1]
    return {
        "weights": arguments.weights,
        "cache": arguments.cache,
        "gpus": arguments.gpus,
        "eager": arguments.eager,
        "room": room,
        "sequences": len(sequences),
        "mean_context": round(sum(map(len, sequences)) / len(sequences)),
        "tokens_per_s": round(rate, 1),
        "gpu_hours": round(ANSWERS * answer / rate / 3600 * arguments.gpus, 1),
        "read_tokens_per_s": round(sum(map(len, sequences)) / read_s),
        "ready_s": round(ready_s, 1),
    }


def step(engine: Any, written: dict[str, int]) -> None:
    """One step of the engine; notes how many tokens each sequence has by then."""
    for output in engine.step():
        written[output.request_id] = len(output.outputs[0].token_ids)


def contexts(arguments: argparse.Namespace, values: dict[str, Any], room: int) -> list[list[int]]:
    """Token ids of as many sequences as the room for keys and values holds to the end."""
    draws, found, used = random.Random(arguments.seed), list[list[int]](), 0.0
    prompt = values["prompt_tokens"]["range"][1]
    while len(found) < arguments.most:
        if len(found) % arguments.samples == 0:
            shared, used = ids(draws, prompt), used + prompt
        sequence = shared + ids(draws, place(draws, values))
        used += len(sequence) - prompt + 2 * arguments.tokens
        if used > HELD * room:
            break
        found.append(sequence)
    return found


def ids(draws: random.Random, count: int) -> list[int]:
    return [draws.randrange(10, QWQ_32B["vocab_size"]) for _ in range(count)]


def place(draws: random.Random, values: dict[str, Any]) -> int:
    """How many tokens of an answer that is being written are there. A lognormal weighted by its
    values has the same deviation and a mean that is larger by the variance, of the logarithm."""
    mean, limit = values["answer_tokens"]["range"][1], values["token_limit"]["range"][0]
    sigma = math.hypot(values["sigma_tasks"]["range"][0], values["sigma_answers"]["range"][0])
    length = draws.lognormvariate(math.log(mean) + sigma**2 / 2, sigma)
    return int(min(length, limit) * draws.random())


def model_directory(directory: Path) -> Path:
    """A model without weights and without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = QWEN2 | QWQ_32B | {"rope_theta": ROPE_THETA}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


if __name__ == "__main__":
    sys.exit(main())
