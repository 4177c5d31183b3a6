"""An endpoint's answers from the bundled recordings, and what a run of the line has written of them
to the disk so far."""

import json
import threading
from collections import Counter
from contextlib import suppress

import pyarrow.parquet as pq

from tasks.sources import bundled
from tests.support.chat_server import completion


class Recordings:
    """Answers with the bundled recordings, and counts; who inherits says when, by `open`."""

    def __init__(self):
        self.open = threading.Event()
        self.answered = Counter()
        self._by_code = [
            (task.code.strip(), bundled.responses(task.name, "cpp")) for task in bundled.load("all")
        ]

    def recorded(self, body):
        prompt, seed = body["messages"][0]["content"], body["seed"]
        texts = next(texts for code, texts in self._by_code if code in prompt)
        self.answered[prompt, seed] += 1
        return 200, completion(texts[seed % len(texts)])


def written(snapshot, columns):
    """Rows as they lie in the parts: nothing is made unique."""
    return [
        row
        for part in sorted(snapshot.glob("part-*.parquet"))
        for row in pq.read_table(part, columns=columns).to_pylist()
    ]


def rows_there(root):
    """Keys of all answers and verdicts on the disk, in parts and in journals."""
    found = Counter()
    for stage in ("synthesis", "verification"):
        for snapshot in root.glob(f"{stage}/*"):
            with suppress(FileNotFoundError):  # a part that a journal becomes while it is looked at
                for row in written(snapshot, ["candidate_id"]):
                    found[stage, row["candidate_id"]] += 1
            for journal in snapshot.glob(".journal-*.jsonl"):
                with suppress(FileNotFoundError):
                    for text in journal.read_text(
                        encoding="utf-8", errors="surrogatepass"
                    ).splitlines():
                        with suppress(ValueError):
                            found[stage, json.loads(text)["candidate_id"]] += 1
    return found
