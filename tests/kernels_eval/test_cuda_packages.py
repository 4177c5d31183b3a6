"""On a GPU: the package of a CUDA kernel holds the library that its verdict is of."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kernels_eval.exchange.package import export_package
from kernels_eval.protocol import Interface
from kernels_eval.records import Language
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


def test_a_package_holds_the_library_that_was_verified(tmp_path):
    code = kernel(HONEST)
    flagged = code.replace("functions=", "extra_cuda_cflags=['-DPLAIN=1'], functions=", 1)
    assert flagged != code
    asked = candidate(ROWS, flagged, language=Language.CUDA)
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
