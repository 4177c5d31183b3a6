"""What the report of a run reads from the snapshots of a refresh."""

from flows.refresh import Refreshed
from flows.report import _candidates
from tasks.store.snapshot import Snapshot
from tests.support.samples import line_of, sample


def test_no_text_of_a_candidate_is_read(tmp_path, monkeypatch):
    rows = [
        sample(f"t{task}", n, 100 + n, 1.0 + n if n else None, status="correct" if n else "no_code")
        | {"reasoning": f"thought {n} about t{task}", "reason": "ok" if n else "no_code"}
        for task in range(20)
        for n in range(3)
    ]
    samples = line_of(tmp_path, rows)
    read, frames = [], Snapshot.frames

    def recorded(snapshot, columns=None):
        assert columns is not None, "every column of a table is read"
        for part, frame in frames(snapshot, columns):
            yield part, frame
            read.append((snapshot.stage, set(columns)))

    monkeypatch.setattr(Snapshot, "frames", recorded)
    found = _candidates(Refreshed(**dict(samples), curated=samples.verdicts))
    assert not any(columns & {"response", "reasoning", "code"} for _, columns in read)
    assert (found["tasks"], found["candidates"]) == (20, 60)
    assert found["status_counts"] == {"correct": 40, "no_code": 20}
