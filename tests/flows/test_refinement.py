"""`concur run --only refresh` with two turns, as a user runs it: an endpoint, real kernels, real
verdicts; and once more for nothing."""

import json
import re
from functools import partial

import polars as pl
import pytest
import yaml

from tasks.sources import bundled
from tests.support.chat_server import completion, serving
from tests.support.commands import concur

RUN_S = 900  # the first run on a machine also precompiles headers
FIRST, RIGHT = {0: 3, 1: 2}, 4
"""Recordings of softmax_rows in C++, by the seed that they answer: one returns an earlier call's
output, one does not compile."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_S)]


@pytest.fixture
def endpoint():
    """Answers the first prompt with a kernel that fails, and each follow-up with one that is right.
    The prompts that it got."""
    prompts = []
    answers = bundled.responses("softmax_rows", "cpp")

    def answer(_, body):
        prompts.append(body["messages"][0]["content"])
        again = "You have answered this before" in prompts[-1]
        return 200, completion(answers[RIGHT if again else FIRST[body["seed"]]], tokens=None)

    with serving(answer) as server:
        yield server.url, prompts


def profile(url, tasks):
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
        "verification": {
            **{"workers": 1, "builders": 1, "screen": False},
            "eval": {"timing": {"max_s": 0.3}},
        },
    }


def test_what_the_verifier_refuses_is_asked_for_again_and_taken(tmp_path, endpoint):
    url, prompts = endpoint
    task = next(task for task in bundled.load("all") if task.name == "softmax_rows")
    (tmp_path / "softmax_rows.py").write_text(task.code)
    (tmp_path / "turns.yaml").write_text(yaml.safe_dump(profile(url, tmp_path / "softmax_rows.py")))
    words = ["run", "--profile", "turns.yaml", "--only", "refresh", "--set", "synthesis.turns=2"]
    # below 0 no speedup lies: whatever the machine's load does to the times, the right kernel is
    # not asked for again
    words += ["--set", "synthesis.refine_below_speedup=0", "--set", "curation.later_turns=true"]

    refresh = partial(
        concur,
        *words,
        cwd=tmp_path,
        OPENAI_API_KEY="none",
        NO_PROXY="127.0.0.1",
        HF_HUB_OFFLINE="1",
    )
    done = refresh()
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

    again = refresh()
    assert again.returncode == 0 and "nothing was new" in again.stdout and len(prompts) == 4
