"""`concur export --as hip`: correct CUDA kernels beside their HIP form, as `datasets` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import polars as pl
import pytest
from click.testing import CliRunner

from flows.cli.main import main
from kernels_eval.compile import hip
from tasks.publishing import pairs
from tasks.tables import HIP_PAIRS
from tests.support.kernels import AFFINE

pytestmark = pytest.mark.slow
needs_hipcc = pytest.mark.skipif(not shutil.which("hipcc"), reason="hipcc is not here")
CODE = """
import torch
from torch.utils.cpp_extension import load_inline
source = r'''
__global__ void twice(float* x) {{ x[threadIdx.x] = 2 * {value}; }}
torch::Tensor run(torch::Tensor x) {{ twice<<<1, 32>>>(x.data_ptr<float>()); return x; }}
'''
extension = load_inline("e", "torch::Tensor run(torch::Tensor x);", source, functions=["run"])
class ModelNew(torch.nn.Module): pass
"""


def row(name: str, value: str = "x[threadIdx.x]", **more: object) -> dict[str, object]:
    return {
        "candidate_id": name,
        "task_id": AFFINE.task_id,
        "language": "cuda",
        "status": "correct",
        "reason": "ok",
        "code": CODE.format(value=value),
        "generator": "m",
        "sample_index": 0,
        **more,
    }


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    text = CODE.format(value="x[1]").replace("\n", "\n    ")
    verdicts = [
        row("good"),
        row("unknown", "__nowhere(x[0])"),
        row("none", code="class ModelNew: pass"),
        row("later", code=f"import torch\nif torch.cuda.is_available():{text}"),
        row("wrong", status="incorrect", reason="wrong_output"),
        row("other", language="cpp"),
    ]
    pl.DataFrame(verdicts).write_parquet(tmp_path / "v.parquet")
    task = {"task_id": [AFFINE.task_id], "code": [AFFINE.code]}
    pl.DataFrame(task).write_parquet(tmp_path / "tasks.parquet")
    names = {"--tasks": "tasks.parquet", "--out": "out"}
    options = [word for name, file in names.items() for word in (name, str(tmp_path / file))]
    return ["export", str(tmp_path / "v.parquet"), "--as", "hip", *options, "--json"]


@needs_hipcc
def test_pairs_are_written_resumed_and_loaded(asked, tmp_path, monkeypatch):
    compiled = pairs._pair

    def interrupted(given: tuple[pairs.Kernel, str]) -> object:
        if given[0][1].candidate_id == "none":
            raise KeyboardInterrupt
        return compiled(given)

    monkeypatch.setattr(pairs.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(pairs, "_pair", interrupted)
    stopped = CliRunner().invoke(main, asked)
    assert stopped.exit_code == 130 and "rerun the same command" in stopped.stderr
    seen: list[str] = []

    def noted(given: tuple[pairs.Kernel, str]) -> object:
        seen.append(given[0][1].candidate_id)
        return compiled(given)

    monkeypatch.setattr(pairs, "_pair", noted)
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert seen == ["none", "later"]  # the others were kept
    told = json.loads(done.stdout)
    assert (told["pairs"], told["compiled"]) == (4, 2)
    assert told["causes"] == {"no_source": 1, "unknown_name": 1}
    assert told["left_out"] == {"the verdict is incorrect": 1, "the language is cpp": 1}
    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=cache, split="train")
    assert loaded.column_names == HIP_PAIRS.names and "status" not in loaded.column_names
    rows = {each["candidate_id"]: each for each in loaded}
    assert rows["good"]["compiled"] and "s_endpgm" in rows["good"]["hip_device"]
    assert "__global__ void twice" in rows["good"]["cuda_source"]
    assert rows["unknown"]["hip_device"] is None and "__nowhere" in rows["unknown"]["detail"]
    again = CliRunner().invoke(main, asked)
    assert json.loads(again.stdout) == told and len(seen) == 2


def test_without_hipcc_nothing_is_begun(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(hip.shutil, "which", lambda name: None)
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 1 and "apt-get install hipcc" in done.stderr
    assert not (tmp_path / "out").exists()
