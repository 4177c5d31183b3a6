"""Which GPUs a process may use, as CUDA has it, by an nvidia-smi that lists four."""

from __future__ import annotations

import os

import pytest

from kernels_eval.devices import gpu_arch, visible_gpus

SMI = """#!/bin/sh
echo
echo "0, GPU-0a1b, NVIDIA H100, 9.0"
echo "1, GPU-1c2d, NVIDIA H100, 9.0"
echo "2, GPU-2e3f, NVIDIA A100, 8.0"
echo "3, GPU-2e4a, NVIDIA A100, 8.0"
"""
H100, A100 = "NVIDIA H100, 9.0", "NVIDIA A100, 8.0"


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (None, [H100, H100, A100, A100]),
        ("", []),
        ("-1", []),
        ("2", [A100]),
        ("2, 0", [A100, H100]),
        ("1,-1,2", [H100]),
        ("0,7,1", [H100]),
        ("GPU-2e4a,GPU-0", [A100, H100]),
        ("2e4a", []),
        ("MIG-5f,MIG-6a", [H100, H100]),
    ],
)
def test_gpus_that_were_not_chosen_do_not_count(tmp_path, monkeypatch, chosen, found):
    script = tmp_path / "nvidia-smi"
    script.write_text(SMI)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == found
    assert gpu_arch() == (found[0][-3:] if found else None)
