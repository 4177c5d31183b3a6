"""On a GPU: the package of a CUDA kernel holds the library that its verdict is of, and a flag for
swaps of instructions decides which one that is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kernels_eval.compile import schedule
from kernels_eval.devices import gpu_arch
from kernels_eval.evaluator import Evaluator
from kernels_eval.exchange.package import export_package
from kernels_eval.protocol import Interface
from kernels_eval.records import Language
from kernels_eval.source.swaps import FLAG
from tests.kernels_eval.test_sanitizer import HONEST, ROWS, kernel
from tests.support.kernels import QUICK, candidate

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
INTERFACE = Interface.model_validate(
    {
        "inputs": [{"name": "x", "shape": [33, 256], "stride": [256, 1], "dtype": "torch.float32"}],
        "state": [],
        "outputs": [{"name": "o", "shape": [33], "stride": [1], "dtype": "torch.float32"}],
        "structure": ".",
        "mutates": False,
    }
)
USE = """
import importlib, sys, torch
sys.path.insert(0, sys.argv[1])
package = importlib.import_module(sys.argv[2])
x = torch.randn(33, 256, device="cuda")
model = package.Model()
assert model.fallback_reason(x) == "", model.fallback_reason(x)
torch.testing.assert_close(model(x), x.sum(1), rtol=1e-4, atol=1e-4)
assert model.fallback_reason(x[:7].clone())
torch.testing.assert_close(model(x[:7].clone()), x[:7].sum(1))
print("used")
"""


def with_flag(flag: str) -> str:
    code = kernel(HONEST)
    assert "functions=" in code
    return code.replace("functions=", f"extra_cuda_cflags={[flag]!r}, functions=", 1)


def instructions(library) -> list[bytes]:
    done = subprocess.run(schedule.command(library), capture_output=True, text=True, check=True)
    return [each.word for _, block in schedule.blocks(library, done.stdout) for each in block]


@pytest.mark.parametrize("flag", ["-DPLAIN=1", f"{FLAG}1"])
def test_a_package_holds_the_library_that_was_verified(tmp_path, flag):
    if gpu_arch() != "9.0" and flag.startswith(FLAG):
        pytest.skip("swaps are of sm_90")
    asked = candidate(ROWS, with_flag(flag), language=Language.CUDA)
    told = export_package(ROWS, asked, INTERFACE, tmp_path / "it", config=QUICK, name="rows")
    built = tmp_path / "it" / "build" / told["variant"]
    (library,) = built.glob("*.so")
    certificate = json.loads((built / "certificate.json").read_text())
    assert certificate["verdict"]["status"] == "correct" and certificate["verdict"]["timing"]
    linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True).stdout
    assert "concur" not in linked
    script = [sys.executable, "-c", USE, str(built), "rows"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0 and "used" in done.stdout, done.stderr


def test_the_flag_changes_the_order_of_instructions_and_the_verdict_is_on_that_library(tmp_path):
    if gpu_arch() != "9.0":
        pytest.skip("swaps are of sm_90")
    found = {}
    with Evaluator(Language.CUDA, QUICK, cuda_arch=gpu_arch()) as evaluator:
        for flag in (f"{FLAG}1", f"{FLAG}1_1"):
            asked = candidate(ROWS, with_flag(flag), language=Language.CUDA)
            prepared = evaluator.preparer.prepare(asked, ROWS)
            verdict = evaluator.run(ROWS, asked, prepared)
            assert verdict.status.value == "correct", verdict.detail
            (found[flag],) = prepared.libraries.values()
    once, twice = (instructions(Path(library)) for library in found.values())
    assert sorted(once) == sorted(twice) and once != twice
