"""What CUDA-L1 published for five GPUs (deepreinforce-ai/CUDA-L1, `optimized_cuda_code`, MIT), as
one set of verdicts for each GPU: input for `concur export SET... --as table`.

    python -m benchmarks.cuda_l1 FOLDER --out sets

FOLDER is `optimized_cuda_code` of a checkout. A row is a kernel that was recorded with a score, as
correct with that speedup over eager PyTorch: their verdict, not ours. The id of a candidate is a
hash of its task and code, so that a kernel published for two GPUs is one candidate. Kernels without
a score are counted and left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from kernels_eval.languages import languages_of
from kernels_eval.records import stable_hash

GPUS = {
    "3090": "NVIDIA GeForce RTX 3090",
    "a100": "NVIDIA A100",
    "h100": "NVIDIA H100",
    "h20": "NVIDIA H20",
    "l40": "NVIDIA L40",
}
"""Files, and what their verdicts' `device` says; the published files name the models only."""


def rows(path: Path, device: str) -> Iterator[dict[str, Any]]:
    """Verdicts of one file. Raises ValueError for another format."""
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        code, score = told["custom_code"], told["score_default"]
        if code is None or score is None:
            continue
        task = f"kernelbench/L{told['level_id']}/{told['task_id']}"
        yield {
            "candidate_id": stable_hash([task, code]),
            "task_id": task,
            "status": "correct",
            "reason": "ok",
            "device": device,
            "timing": {"speedup": float(score)},
            "language": next(map(str, languages_of(code)), ""),
            "code": code,
            "generator": "CUDA-L1",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("sets"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, device in GPUS.items():
        path = asked.folder / f"{name}.json"
        frame = pl.DataFrame(list(rows(path, device)), infer_schema_length=None)
        frame.write_parquet(asked.out / f"{name}.parquet")
        total = len(path.read_text(encoding="utf-8").splitlines())
        cuda = frame.filter(pl.col("language") == "cuda").height
        print(f"{device}: {frame.height} of {total} with a kernel and a score, {cuda} in CUDA")


if __name__ == "__main__":
    main()
