"""Settings that came later leave every key and every snapshot of before as it was: what has been
asked is not asked again."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from kernels_eval.records import KernelTask, Language, SamplingParams, candidate_id
from tasks.benchmark.config import BenchmarkConfig
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, SnapshotRef, fingerprint, known_rows
from tasks.synthesis import requests as requests_module
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.requests import Questions, first_requests
from tasks.synthesis.stage import STAGE, Synthesis
from tasks.tables import CANDIDATES, SAMPLING, TASKS

TASK = KernelTask(task_id="t/0", name="t0", code="# 0")
LATER = [{"top_k": 40}, {"top_k": 0}, {"min_p": 0.0}, {"min_p": 0.1}, {"repetition_penalty": 1.0}]

# computed at commit a0d341a, before top_k, min_p and repetition_penalty
CANDIDATE_IDS = {
    "961ef26563a774a105fb1e95ab0e109b": (SamplingParams(), 0),
    "6f6a67fd30eaeeebb277dbb5301a8271": (
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=4096, seed=3),
        2,
    ),
}
REQUEST_KEYS = {
    ("f4d5ed2421837efb20a88e9437cf0b2f", "710ba904acc37affc959811cf79808ab"): SamplingParams(),
    ("bfc2e3c8e6eb3910ad7dcda97cd43b4c", "a74ab05682ca929b6da1b548eb2a0602"): SamplingParams(
        temperature=0.6, top_p=0.95
    ),
}
BENCHMARK_FINGERPRINT = "83159991a16619c80d47828457074cf4"

OLD_SAMPLING = pa.struct(
    [SAMPLING.field(name) for name in ("temperature", "top_p", "max_tokens", "seed")]
)
OLD_CANDIDATES = pa.schema(
    [field.with_type(OLD_SAMPLING) if field.name == "sampling" else field for field in CANDIDATES]
)


@pytest.fixture
def tasks(tmp_path):
    snapshot = Snapshot(str(tmp_path), "tasks", "one")
    snapshot.append([TASK.model_dump(mode="json")], TASKS)
    return snapshot.publish(config={}, rows=1).ref


def config(sampling: SamplingParams, samples: int = 2) -> SynthesisConfig:
    return SynthesisConfig(
        sampler="openai",
        model="m",
        base_url="http://127.0.0.1:1/v1",
        samples_per_task=samples,
        sampling=sampling,
    )


def request_keys(tasks: SnapshotRef, sampling: SamplingParams) -> tuple[str, ...]:
    return tuple(
        first_requests(Questions(read_tasks(tasks), config(sampling), Language.CUDA, "m")).keys
    )


def test_a_candidate_keeps_its_identity_and_a_setting_that_is_sent_gives_another():
    for identity, (sampling, index) in CANDIDATE_IDS.items():
        assert candidate_id(TASK, "g", sampling, index, "text") == identity
        unsaid = sampling.model_copy(
            update={"top_k": None, "min_p": None, "repetition_penalty": None}
        )  # as read from Parquet
        assert candidate_id(TASK, "g", unsaid, index, "text") == identity
    identities = {
        candidate_id(TASK, "g", SamplingParams(**later), 0, "text") for later in [{}, *LATER]
    }
    assert len(identities) == 1 + len(LATER), "0 is sent too: a server may have other defaults"


def test_a_request_keeps_its_key_and_a_setting_that_is_sent_gives_another(tasks, monkeypatch):
    monkeypatch.setattr(
        requests_module, "render", lambda *arguments, **named: "a prompt"
    )  # the keys are not about what prompts say
    for keys, sampling in REQUEST_KEYS.items():
        assert request_keys(tasks, sampling) == keys
        assert request_keys(tasks, sampling.model_copy(update={"top_k": None})) == keys
    found = [key for later in [{}, *LATER] for key in request_keys(tasks, SamplingParams(**later))]
    assert len(set(found)) == len(found)


def test_the_fingerprint_of_a_configuration_stays(tasks):
    metrics = {
        "ks": (1, 5),
        "ps": (0.0, 0.5, 1.0, 1.5, 2.0),
    }  # the defaults when the fingerprint was taken
    assert fingerprint("benchmark", BenchmarkConfig(**metrics)) == BENCHMARK_FINGERPRINT
    other = BenchmarkConfig(**metrics, sampling=SamplingParams(max_tokens=4096, top_k=20))
    assert fingerprint("benchmark", other) != BENCHMARK_FINGERPRINT


def old_row(request_key: str, index: int) -> dict:
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16384, "seed": index}
    row = {
        "candidate_id": f"c{index}",
        "task_id": "t/0",
        "language": "cuda",
        "generator": "m",
        "sampling": sampling,
        "sample_index": index,
    }
    return row | {"response": f"text {index}", "request_key": request_key}


def test_an_older_snapshot_answers_what_is_asked_now(tasks):
    """Through the whole stage, at an address where nobody listens."""
    keys = request_keys(tasks, SamplingParams())
    old = Snapshot(tasks.root, STAGE, "0ld")
    old.append([old_row(key, index) for index, key in enumerate(keys)], OLD_CANDIDATES)
    old.publish(config={})
    made = Synthesis(tasks, config(SamplingParams()), Language.CUDA).run().open()
    assert made.fingerprint != "0ld" and made.manifest["rows"] == 2
    frame = made.read()
    assert frame["response"].to_list() == ["text 0", "text 1"]
    assert frame["sampling"].to_list() == [
        {
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 16384,
            "seed": index,
            "top_k": None,
            "min_p": None,
            "repetition_penalty": None,
        }
        for index in range(2)
    ]


def test_parts_of_both_forms_read_as_one_table_whichever_is_first(tmp_path):
    new_row = old_row("k1", 1)
    new_row["sampling"] |= {"top_k": 40, "min_p": 0.0, "repetition_penalty": 1.1}
    both = [(OLD_CANDIDATES, old_row("k0", 0)), (CANDIDATES, new_row)]
    for name, parts in (("old first", both), ("new first", both[::-1])):
        snapshot = Snapshot(str(tmp_path), "synthesis", name)
        for schema, row in parts:
            snapshot.append([row], schema)
        read = {row["request_key"]: row["sampling"] for row in snapshot.read().to_dicts()}
        assert (read["k0"]["top_k"], read["k0"]["seed"]) == (None, 0)
        assert (read["k1"]["top_k"], read["k1"]["min_p"], read["k1"]["repetition_penalty"]) == (
            40,
            0.0,
            1.1,
        )
        assert {
            row["request_key"]: row["sampling"].get("top_k")
            for row in known_rows(str(tmp_path), "synthesis", "request_key", read, CANDIDATES)
        } == {
            "k0": None,
            "k1": 40,
        }


def test_rows_of_an_older_journal_are_recovered(tmp_path):
    """A run of before that was killed left a journal, whose rows are without the settings that came
    later."""
    snapshot = Snapshot(str(tmp_path), "synthesis", "killed")
    snapshot.append([old_row("k0", 0)], OLD_CANDIDATES)
    journal = Path(snapshot.path) / ".journal-01700000000000000000-999999.jsonl"
    journal.write_text(
        "".join(json.dumps(old_row(f"k{index}", index)) + "\n" for index in (1, 2)),
        encoding="utf-8",
    )
    assert snapshot.recover(CANDIDATES) == 2 and not journal.exists()
    assert [(row["seed"], row["top_k"]) for row in snapshot.read()["sampling"].to_list()] == [
        (0, None),
        (1, None),
        (2, None),
    ]
