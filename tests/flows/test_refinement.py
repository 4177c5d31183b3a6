"""`concur run --only refresh` with two turns, as a user runs it: an endpoint, real kernels, real
verdicts; and once more for nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import polars as pl
import pytest
import yaml

import flows
from tasks.sources import bundled

ROOT = Path(flows.__file__).parent.parent
RUN_S = 900  # the first run on a machine also precompiles headers
FIRST, RIGHT = {0: 3, 1: 2}, 4
"""Recordings of softmax_rows in C++, by the seed that they answer: one returns an earlier call's
output, one does not compile."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_S)]


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[str]]]:
    """Answers the first prompt with a kernel that fails, and each follow-up with one that is right.
    The prompts that it got."""
    prompts: list[str] = []
    answers = bundled.responses("softmax_rows", "cpp")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            prompts.append(body["messages"][0]["content"])
            text = answers[
                RIGHT if "You have answered this before" in prompts[-1] else FIRST[body["seed"]]
            ]
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
            raw = json.dumps(
                {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [choice],
                }
            ).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", prompts
    server.shutdown()
    thread.join()
    server.server_close()


def profile(url: str, tasks: Path) -> dict:
    return {
        "name": "turns",
        "root": "out",
        "language": "cpp",
        "tasks": {"source": "files", "location": str(tasks)},
        "synthesis": {
            "sampler": "openai",
            "model": "m",
            "base_url": url,
            "tokenizer": "small",
            "samples_per_task": 2,
        },
        "verification": {"workers": 1, "builders": 1, "eval": {"timing": {"max_s": 0.3}}},
    }


def test_what_the_verifier_refuses_is_asked_for_again_and_taken(
    tmp_path: Path, endpoint: tuple[str, list[str]]
) -> None:
    url, prompts = endpoint
    task = next(task for task in bundled.load("all") if task.name == "softmax_rows")
    (tmp_path / "softmax_rows.py").write_text(task.code)
    (tmp_path / "turns.yaml").write_text(yaml.safe_dump(profile(url, tmp_path / "softmax_rows.py")))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_", "RAY_"))
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
        "NO_PROXY": "127.0.0.1",
    }
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "run",
        "--profile",
        "turns.yaml",
        "--only",
        "refresh",
        "--set",
        "synthesis.turns=2",
    ]
    # below 0 no speedup lies: whatever the machine's load does to the times, the right kernel is
    # not asked for again
    command += ["--set", "synthesis.refine_below_speedup=0", "--set", "curation.later_turns=true"]

    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=RUN_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "turn 1 2, turn 2 2" in done.stdout
    assert (
        len(prompts) == 4
        and prompts[0] == prompts[1]
        and all(prompt.startswith(prompts[0]) for prompt in prompts)
    )
    stale, broken = sorted(prompts[2:], key=lambda prompt: "compile_error" in prompt)
    assert (
        "Verdict on it: rejected. It breaks this rule: Every call must compute its output anew"
        in stale
    )
    said = broken[broken.index("compile_error (build_failed)") :]
    assert (
        "error: \u2018rmax\u2019 was not declared" in said
        or "error: 'rmax' was not declared" in said
    )
    assert not re.search(r"/\w+/\w+", said), "no path of this machine"

    (last,) = [
        path
        for path in tmp_path.glob("out/synthesis/*/manifest.json")
        if json.loads(path.read_text()).get("turn") == 2
    ]
    candidates = pl.read_parquet(last.parent / "part-*.parquet").sort("turn")
    assert candidates["turn"].to_list() == [1, 1, 2, 2]
    assert (
        set(candidates["parent"][2:]) == set(candidates["candidate_id"][:2])
        and candidates["parent"][:2].null_count() == 2
    )
    curated = pl.read_parquet(tmp_path / "out/curation/*/part-*.parquet")
    assert len(curated) and set(curated["candidate_id"]) <= set(candidates["candidate_id"][2:])
    keys = [
        set(pl.read_parquet(f"{path.parent}/part-*.parquet")["verdict_key"])
        for path in tmp_path.glob("out/verification/*/manifest.json")
    ]
    assert sorted(map(len, keys)) == [2, 4] and len(set.union(*keys)) == 4, (
        "the second verification reuses the verdicts of the first"
    )

    again = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=RUN_S, capture_output=True, text=True
    )
    assert again.returncode == 0 and "nothing was new" in again.stdout and len(prompts) == 4
