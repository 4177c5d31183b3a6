"""The guard of an exported package: it runs the kernel where all is as it was verified, and
PyTorch's operators elsewhere. The kernel here adds 100, so that a result says who made it."""

import hashlib
import importlib.util
import json
import shutil
import sys
from itertools import count

import pytest
import torch
from torch.autograd import forward_ad

from kernels_eval.exchange.package import GUARD, _forms
from kernels_eval.protocol import Interface

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.weight = torch.nn.Parameter(torch.ones(8))
    def forward(self, x, shift):
        return x * self.weight * self.scale + shift
def get_inputs():
    return [torch.randn(4, 8), 1.0]
def get_init_inputs():
    return [2.0]
"""
KERNEL = REFERENCE.replace("class Model(", "class ModelNew(").replace("+ shift", "+ shift + 100")
INTERFACE = Interface.model_validate(
    {
        "inputs": [
            {"name": "x", "shape": [4, 8], "stride": [8, 1], "dtype": "torch.float32"},
            {"name": "shift", "value": 1.0},
        ],
        "state": [{"name": "weight", "shape": [8], "stride": [1], "dtype": "torch.float32"}],
        "outputs": [{"name": "o", "shape": [4, 8], "stride": [8, 1], "dtype": "torch.float32"}],
        "structure": ".",
        "mutates": False,
    }
)
BUILT_FOR = {"torch": None, "python": None, "machine": None, "cpu_flags": [], "capability": None}
numbers = count()


def packed(folder, kernel=KERNEL, **built_for):
    """The package of this kernel, imported."""
    folder.mkdir()
    name = f"_guarded_{next(numbers)}"
    files = {"reference.py": REFERENCE, "candidate.py": kernel}
    for path, text in files.items():
        (folder / path).write_text(text)
    certificate = {
        "id": name,
        "entry_point": "Model",
        "init_form": "args",
        "interface": _forms(INTERFACE),
        "built_for": {**BUILT_FOR, **built_for},
        "verdict": {"flags": []},
        "files": {p: hashlib.sha256(t.encode()).hexdigest() for p, t in files.items()},
    }
    (folder / "certificate.json").write_text(json.dumps(certificate))
    shutil.copy(GUARD, folder / "__init__.py")
    return imported(folder, name)


def imported(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("package") / "it")


@pytest.fixture
def model(package):
    found = package.Model()
    return found.requires_grad_(False)


X = torch.arange(32.0).reshape(4, 8)


def by_kernel(model, x, shift=1.0):
    """Whether the kernel ran; what came out is right but for its 100."""
    expected = x * model.weight * model.scale + shift
    found = model(x, shift)
    ran = not torch.allclose(found, expected)
    torch.testing.assert_close(found, expected + 100 * ran)
    assert ran == (not model.fallback_reason(x, shift))
    return ran


def test_the_kernel_runs_for_what_was_verified(package, model):
    assert by_kernel(model, X) and not package.fallback_reason()
    assert list(model.state_dict()) == ["weight"]
    model.load_state_dict({"weight": torch.full((8,), 3.0)})
    assert by_kernel(model, X)  # with the weights of now


LIKE = {
    "shape": X[:3],
    "dtype": X.double(),
    "strides": X.t().contiguous().t(),
    "offset": torch.zeros(5, 8)[1:],
    "subclass": torch.Tensor._make_subclass(type("Mine", (torch.Tensor,), {}), X),
    "address": torch.frombuffer(bytearray(132), dtype=torch.float32, offset=4).reshape(4, 8),
    "negative": torch.randn(4, 8, dtype=torch.complex64).conj().imag.contiguous()._neg_view(),
}


@pytest.mark.parametrize("case", LIKE)
def test_another_input_runs_the_reference(model, case):
    assert not by_kernel(model, LIKE[case])


@pytest.mark.parametrize("shift", [2.0, 1, True, X[0]])
def test_another_value_runs_the_reference(model, shift):
    assert not by_kernel(model, X, shift)


def test_other_arguments_and_weights_run_the_reference(package, model):
    assert by_kernel(package.Model(2.0).requires_grad_(False), X)
    assert not by_kernel(package.Model(3.0).requires_grad_(False), X)
    assert not by_kernel(package.Model(scale=2.0).requires_grad_(False), X)
    model.double()
    assert not by_kernel(model, X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_no_shape_tells_runs_the_reference(package, model, monkeypatch):
    assert "layout" in model.fallback_reason(torch.nested.nested_tensor([X, X]), 1.0)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert "default dtype" in model.fallback_reason(X, 1.0) and not by_kernel(model, X)


def test_a_kernel_is_launched_on_the_device_of_its_tensors(model, monkeypatch):
    entered, device_of = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x) or device_of(x))
    assert by_kernel(model, X) and entered[0] is X


def test_keywords_and_wrong_calls_are_the_references(model):
    torch.testing.assert_close(model(x=X, shift=1.0), X * 2 + 1)
    with pytest.raises(TypeError, match="missing"):
        model(X)


def test_autocast_runs_the_reference(model):
    with torch.autocast("cpu"):
        assert not by_kernel(model, X)


def test_no_gradient_is_lost(package, model):
    x = X.clone().requires_grad_()
    model(x, 1.0).sum().backward()
    assert x.grad.unique().tolist() == [2.0]
    trained = package.Model()
    trained(X, 1.0).sum().backward()
    assert trained.weight.grad is not None
    with torch.no_grad():
        assert by_kernel(trained, X)
    total = torch.func.grad(lambda x: model(x, 1.0).sum())(X)
    assert total.unique().tolist() == [2.0]
    _, tangent = torch.func.jvp(lambda x: model(x, 1.0), (X,), (torch.ones_like(X),))
    assert tangent.unique().tolist() == [2.0]
    with forward_ad.dual_level(), torch.no_grad():
        made = model(forward_ad.make_dual(X, torch.ones_like(X)), 1.0)
        assert forward_ad.unpack_dual(made).tangent.unique().tolist() == [2.0]
    stacked = torch.func.vmap(lambda x: model(x, 1.0))(torch.stack([X, X]))
    torch.testing.assert_close(stacked[1], X * 2 + 1)


@pytest.mark.slow
def test_the_operator_refuses_derivatives_and_guards_itself(package, model):
    operator = getattr(torch.ops, package.certificate["id"]).forward
    weight = model.weight.detach()
    torch.testing.assert_close(operator([X, weight])[0], X * 2 + 101)
    torch.testing.assert_close(operator([X[1:], weight])[0], X[1:] * 2 + 1)
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        operator([x, weight])[0].sum().backward()
    with pytest.raises(RuntimeError, match="no forward derivative"):
        torch.func.jvp(lambda x: operator([x, weight])[0], (X,), (X,))
    torch.library.opcheck(operator, ([X, weight],), raise_exception=True)


@pytest.mark.slow
def test_compiled_it_is_one_graph_with_the_operator_where_it_may_be(package, model):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, 1.0), X * 2 + 101)
        for other in (X[:3], X[:2], X.double(), X.t().contiguous().t()):
            torch.testing.assert_close(compiled(other, 1.0), other * 2 + 1)
        torch.testing.assert_close(compiled(X, 2.0), X * 2 + 2)
    ours = [any("forward" in str(node.target) for node in g.graph.nodes) for g in graphs]
    assert ours[0] and sum(ours) == 1
    x = X.clone().requires_grad_()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x, 1.0).sum().backward()
    assert x.grad.unique().tolist() == [2.0]
    derived = torch.compile(
        lambda x: torch.func.jvp(lambda x: model(x, 1.0), (x,), (x,))[1], backend="aot_eager"
    )
    torch.testing.assert_close(derived(X), X * 2)


@pytest.mark.parametrize(
    "built_for, says",
    [
        ({"torch": "1.0.0"}, "built for torch 1.0.0"),
        ({"python": "cpython-30"}, "built for python"),
        ({"machine": "riscv64"}, "built for machine riscv64"),
        ({"cpu_flags": ["of_tomorrow"]}, "lacks of_tomorrow"),
    ],
)
def test_another_machine_runs_the_reference(tmp_path, built_for, says):
    package = packed(tmp_path / "it", **built_for)
    assert says in package.fallback_reason()
    torch.testing.assert_close(package.Model().requires_grad_(False)(X, 1.0), X * 2 + 1)


@pytest.mark.parametrize(
    "kernel, says",
    [
        ("raise OSError('no library')", "does not load here: no library"),
        (KERNEL.replace("self.weight", "self.other"), "parameters are not those"),
        (KERNEL.replace("torch.ones(8)", "torch.ones(8, 1)"), "parameters are not those"),
    ],
)
def test_a_kernel_that_does_not_load_runs_the_reference(tmp_path, kernel, says):
    package = packed(tmp_path / "it", kernel)
    assert says in package.Model().requires_grad_(False).fallback_reason(X, 1.0)
    torch.testing.assert_close(package.Model().requires_grad_(False)(X, 1.0), X * 2 + 1)


def test_a_changed_file_runs_the_reference(tmp_path):
    package = packed(tmp_path / "it")
    (tmp_path / "it/candidate.py").write_text(KERNEL + "\n")
    again = imported(tmp_path / "it", "_guarded_again")
    assert "candidate.py is not the file" in again.fallback_reason()
    assert package is not again
