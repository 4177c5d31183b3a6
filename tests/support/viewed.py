"""Sites of candidates: a root's, and one in which every text of a stranger would act on a page if
it were taken for markup."""

import base64
import gzip
import json
import re
from pathlib import Path

import polars as pl

from flows.view import write_view
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.stage import Answers, run
from tasks.store import Snapshot, SnapshotRef
from tests.support.curated import line, sample
from tests.support.payloads import HOSTILE, LINES
from tests.support.samples import frame
from tests.support.samples import sample as verified

TASK = f"""import torch.nn as nn
x = {LINES!r}
class Model(nn.Module):
    def forward(self, x):
        return x
def get_inputs(): return [1]
def get_init_inputs(): return []
"""
SCRIPT = re.compile(r'register\("[a-z0-9-]+","([A-Za-z0-9+/]+=*)"\)\n')
KERNEL = 'import torch\nsource = """\nvoid add(float* x) {{ x[0] += {}; }}\n"""\n'


def unpacked(path):
    """What one of the site's scripts registers; fails where it is anything but one call."""
    found = SCRIPT.fullmatch(path.read_text(encoding="ascii"))
    assert found, path
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def index_of(site):
    """The columns of the index, decoded."""
    columns = unpacked(site / "data/index.js")["columns"]
    return {
        name: [column["values"][row] for row in column["rows"]]
        if isinstance(column, dict)
        else column
        for name, column in columns.items()
    }


def details_of(site):
    """What is there of each candidate, in the order of the index."""
    return [
        row
        for name in unpacked(site / "data/index.js")["chunks"]
        for row in unpacked(site / f"data/{name}.js")
    ]


def root_with_benchmark(root):
    """A root with a training set of four tasks, and a benchmark of two other models."""
    own = [
        sample(f"t/{task}", n, 100 + 50 * n, 1.0 + task + n, code=KERNEL.format(n))
        for task in range(4)
        for n in range(3)
    ]
    own[0]["level"] = "screen"
    line(root, [*own, sample("t/0", 9, 5, None)], flags={"t-0-1": ["repetitive"]})
    answers = []
    for model, speedup in (("base", 0.5), ("tuned", 2.5)):
        told = {"generator": model, "id": ""}
        rows = [
            sample(f"b/{task}", n, 80, speedup + n, **told | {"id": f"{model}-{task}-{n}"})
            for task in range(2)
            for n in range(2)
        ]
        curated = line(root / model, rows).open().manifest["upstream"]
        refs = [_moved(root, model, stage, curated) for stage in ("synthesis", "verification")]
        _moved(root, model, "tasks", curated)
        answers.append(Answers(model=model, candidates=refs[0], verdicts=refs[1]))
    run(answers, BenchmarkConfig(samples_per_task=2))
    return root


def _moved(root, model, stage, among):
    (found,) = (name for name in among if Snapshot(str(root / model), stage, name).finished)
    target = root / stage / found
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        (root / model / stage / found).rename(target)
    return SnapshotRef(root=str(root), stage=stage, fingerprint=found)


def hostile_site(folder):
    """The page of candidates whose every text is hostile: ids, tasks, models, reasons, flags,
    texts, logs, and the name of the folder they are in."""
    rows = [
        verified(HOSTILE, n, 100, 1.5 + n) | {"candidate_id": f"{HOSTILE} {n}"} for n in range(2)
    ]
    texts = {
        **dict.fromkeys(("generator", "reason", "detail", "device", "build_tier"), HOSTILE),
        **dict.fromkeys(("reasoning", "answer", "code", "log_tail", "finish_reason"), LINES),
        **{name: [HOSTILE] for name in ("flags", "custom_kernels", "library_calls")},
    }
    place = folder / "<script>parent.__xss=1<"
    place.mkdir(parents=True)
    table = frame(*(row | texts for row in rows))
    table = table.with_columns(code=pl.concat_str(pl.lit('x = """{;\n'), "code", "candidate_id"))
    table.write_parquet(place / "verdicts.parquet")
    tasks = pl.DataFrame({"task_id": [HOSTILE], "name": [HOSTILE + "!"], "code": [TASK]})
    tasks.write_parquet(folder / "tasks.parquet")
    out = str(folder / "site")
    asked = {"tasks": str(folder / "tasks.parquet"), "out": out}
    return Path(write_view(str(place / "verdicts.parquet"), **asked)["page"])
