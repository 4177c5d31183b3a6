"""Settings that came later leave every key and every snapshot of before as it was: what has been
asked is not asked again."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from kernels_eval.records import KernelTask, Language, SamplingParams, candidate_id
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, known_rows
from tasks.synthesis import requests as requests_module
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.requests import Questions, first_requests
from tasks.synthesis.stage import STAGE, Synthesis
from tasks.tables import CANDIDATES, SAMPLING, TASKS
from tests.support.cases import cases
from tests.support.requests import named_sampler

CASES = cases("sampling_keys")

TASK = KernelTask(task_id="t/0", name="t0", code="# 0")
LATER = CASES["later"]

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


def config(sampling, samples=2):
    return SynthesisConfig(
        sampler="openai",
        model="m",
        base_url="http://127.0.0.1:1/v1",
        samples_per_task=samples,
        sampling=sampling,
    )


def request_keys(tasks, sampling):
    return tuple(
        first_requests(
            Questions(read_tasks(tasks), config(sampling), Language.CUDA, named_sampler())
        ).keys
    )


def test_a_candidate_keeps_its_identity_and_a_setting_that_is_sent_gives_another():
    for identity, case in CASES["candidate_ids"].items():
        # without and with the later settings, which Parquet reads as unset
        for sampling in (case["sampling"], case["sampling"] | CASES["unset"]):
            found = candidate_id(TASK, "g", SamplingParams(**sampling), case["index"], "text")
            assert found == identity
    identities = {
        candidate_id(TASK, "g", SamplingParams(**later), 0, "text") for later in [{}, *LATER]
    }
    assert len(identities) == 1 + len(LATER), "0 is sent too: a server may have other defaults"


def test_a_request_keeps_its_key_and_a_setting_that_is_sent_gives_another(tasks, monkeypatch):
    monkeypatch.setattr(
        requests_module, "render", lambda *arguments, **named: "a prompt"
    )  # the keys are not about what prompts say
    for case in CASES["request_keys"]:
        for sampling in (case["sampling"], case["sampling"] | {"top_k": None}):
            assert list(request_keys(tasks, SamplingParams(**sampling))) == case["keys"]
    found = [key for later in [{}, *LATER] for key in request_keys(tasks, SamplingParams(**later))]
    assert len(set(found)) == len(found)


def old_row(request_key, index):
    sampling = CASES["old_sampling"] | {"seed": index}
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
    expected = CASES["old_sampling"] | CASES["unset"]
    assert frame["sampling"].to_list() == [expected | {"seed": index} for index in range(2)]


def test_parts_of_both_forms_read_as_one_table_whichever_is_first(tmp_path):
    new_row = old_row("k1", 1)
    new_row["sampling"] |= CASES["set"]
    both = [(OLD_CANDIDATES, old_row("k0", 0)), (CANDIDATES, new_row)]
    for name, parts in (("old first", both), ("new first", both[::-1])):
        snapshot = Snapshot(str(tmp_path), "synthesis", name)
        for schema, row in parts:
            snapshot.append([row], schema)
        read = {row["request_key"]: row["sampling"] for row in snapshot.read().to_dicts()}
        assert (read["k0"]["top_k"], read["k0"]["seed"]) == (None, 0)
        assert CASES["set"].items() <= read["k1"].items()
        assert {
            row["request_key"]: row["sampling"].get("top_k")
            for row in known_rows(str(tmp_path), "synthesis", "request_key", read, CANDIDATES)
        } == {"k0": None, "k1": 40}


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
