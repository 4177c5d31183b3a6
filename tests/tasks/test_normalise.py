"""Canonical forms and operator sequences: what they do not see, and what they must."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.checks.syntax import parse_source
from tasks.decontamination.normalise import CODE_LIMIT, canonical, parse_program
from tasks.decontamination.operator_sequence import operator_sequence

TASK = '''
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Scores."""

    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(width, depth)
        self.second = nn.LayerNorm(depth)
        self.scale = 0.5

    def forward(self, x):
        hidden = F.gelu(self.first(x))  # the only activation
        shifted = torch.cumsum(x, dim=1)
        total = self.second(hidden) * self.scale
        return total, shifted


width = 16 * 4
depth = 48


def get_inputs():
    return [torch.rand(32, width)]


def get_init_inputs():
    return [width, depth]
'''
SEQUENCE = ("linear", "gelu", "layernorm", "mul", "cumsum")


def changed(*pairs):
    code = TASK
    for old, new in pairs:
        assert old in code
        code = code.replace(old, new)
    return code


SAME = {
    "comments": changed(("  # the only activation", ""), ('    """Scores."""\n\n', "")),
    "aliases": changed(
        ("import torch.nn.functional as F", "from torch.nn import functional"),
        ("F.gelu", "functional.gelu"),
    ),
    "annotations": changed(("def forward(self, x)", "def forward(self, x: torch.Tensor) -> tuple")),
    "constants": changed(("width = 16 * 4", "width = 64")),
    "inlined": changed(("torch.rand(32, width)", "torch.rand(32, 64)")),
    "size as a list": changed(("torch.rand(32, width)", "torch.rand([32, width])")),
    "keywords": changed(
        ("nn.Linear(width, depth)", "nn.Linear(out_features=depth, in_features=width)")
    ),
    "statements": changed(
        ("        hidden = F.gelu(self.first(x))  # the only activation\n", ""),
        ("        total =", "        hidden = F.gelu(self.first(x))\n        total ="),
    ),
    "layers": changed(
        ("        self.first = nn.Linear(width, depth)\n", ""),
        (
            "        self.scale = 0.5\n",
            "        self.scale = 0.5\n        self.first = nn.Linear(width, depth)\n",
        ),
    ),
    "arguments by name": changed(("[width, depth]", "[[], {'depth': 48, 'width': 64}]")),
    "arguments in both ways": changed(("[width, depth]", "[[64], dict(depth=48)]")),
    "arguments in variables": changed(
        ("return [width, depth]", "sizes = [width, depth]; return sizes")
    ),
    "arguments by default": changed(
        ("self, width, depth", "self, width=64, *, depth=48"), ("[width, depth]", "[[], {}]")
    ),
    "arguments in an object": changed(
        ("self, width, depth", "self, config"),
        ("nn.Linear(width, depth)", "nn.Linear(config.width, config['depth'])"),
        ("nn.LayerNorm(depth)", "nn.LayerNorm(config.depth)"),
        ("[width, depth]", "[[], {'config': _mock_config(width=64, depth=48)}]"),
    ),
    "arguments written out": changed(
        ("self, width, depth", "self"),
        ("nn.Linear(width, depth)", "nn.Linear(64, 48)"),
        ("nn.LayerNorm(depth)", "nn.LayerNorm((48,), bias=True)"),
        ("[width, depth]", "[]"),
    ),
    "arguments kept in attributes": changed(
        ("self.first = nn.Linear(width,", "self.width = width; self.first = nn.Linear(self.width,")
    ),
    "a branch that no argument takes": changed(
        ("self, width, depth", "self, width, depth, scale=None"),
        ("self.scale = 0.5", "if scale is None: self.scale = 0.5\n        else: self.scale = 1"),
    ),
    "size as a tuple": changed(("torch.rand(32, width)", "torch.rand((32, width))")),
    "size by name": changed(("torch.rand(32, width)", "torch.rand(size=[32, width])")),
    "drawn otherwise": changed(("torch.rand(32, width)", "torch.randn(32, width).abs() * 2")),
    "a constant written otherwise": changed(("self.scale = 0.5", "self.scale = 1 / 2")),
    "a constant in its place": changed(
        ("        self.scale = 0.5\n", ""), ("* self.scale", "* 0.5")
    ),
    "a default written out": changed(("nn.Linear(width, depth)", "nn.Linear(width, depth, True)")),
    "a method": changed(("torch.cumsum(x, dim=1)", "x.cumsum(1)")),
    "sides exchanged": changed(
        ("self.second(hidden) * self.scale", "torch.mul(self.scale, self.second(hidden))")
    ),
    "temporary": changed(("return total, shifted", "both = (total, shifted)\n        return both")),
    "unused helper": TASK + "\n\ndef helper(x):\n    return x\n",
    "wrapper": TASK.replace("class Model", "class Inner")
    + """

class Model(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.inner = Inner(width, depth)

    def forward(self, x):
        return self.inner(x)
""",
    "starred wrapper": TASK.replace("class Model", "class Inner")
    + """

class Model(nn.Module):
    def __init__(self, *args, **kwargs):
        super(Model, self).__init__()
        self.inner = Inner(*args, **kwargs)

    def forward(self, *args):
        return self.inner(*args)
""",
}
OTHER = {
    "operator": changed(("F.gelu", "F.relu")),
    "axis": changed(("dim=1", "dim=2")),
    "bias": changed(("nn.Linear(width, depth)", "nn.Linear(width, depth, bias=False)")),
    "mode": changed(("F.gelu(", "F.gelu(approximate='tanh', input=")),
    "sides of a difference": changed(
        ("F.gelu(self.first(x))", "F.gelu(self.first(x)) - 1"),
        ("self.second(hidden) *", "self.second(1 - hidden) *"),
    ),
    "operand": changed(("self.second(hidden)", "self.second(shifted)")),
    "order of results": changed(("return total, shifted", "return shifted, total")),
    "reads itself": changed(
        ("total = self.second(hidden)", "total = self.second(hidden + hidden)")
    ),
}


@pytest.mark.parametrize("code", SAME.values(), ids=SAME)
def test_what_does_not_change_the_program_does_not_change_its_form(code):
    assert canonical(code).exact != canonical(TASK).exact
    assert canonical(code).normalised == canonical(TASK).normalised
    assert operator_sequence(parse_program(code)) == SEQUENCE


@pytest.mark.parametrize("code", OTHER.values(), ids=OTHER)
def test_another_program_has_another_form_whatever_its_sizes(code):
    assert canonical(code).normalised != canonical(TASK).normalised
    assert canonical(code).shapes != canonical(TASK).shapes


def test_other_sizes_are_another_program_of_the_same_shapes_form():
    code = changed(
        ("depth = 48", "depth = 96"),
        ("32, width", "8, width"),
        ("self.scale = 0.5", "self.scale = 0.25"),
    )
    assert canonical(code).normalised != canonical(TASK).normalised
    assert canonical(code).shapes == canonical(TASK).shapes
    assert canonical(code).inputs != canonical(TASK).inputs


@pytest.mark.parametrize(
    "form",
    [
        "F.relu(x)",
        "torch.relu(x)",
        "x.relu()",
        "nn.ReLU()(x)",
        "x.relu_()",
        "self.act(x)",
        "self.help(x)",
    ],
)
def test_one_operator_has_one_name_however_it_is_called(form):
    code = f"""
import torch
from torch import nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def help(self, value):
        return self.act(value)

    def forward(self, x):
        unused = torch.sigmoid(x)
        return {form}.view(-1)
"""
    assert operator_sequence(parse_program(code)) == ("relu",)


def test_sequences_go_through_containers_helpers_and_submodules():
    code = """
import torch.nn as nn

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, size), nn.Tanh())

    def forward(self, x):
        return x + self.layers(x)

class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        layers = [Block(size)]
        layers.append(nn.Softmax(dim=1))
        self.body = nn.Sequential(*layers)
        self.rest = nn.ModuleList([nn.LayerNorm(size) for _ in range(3)])

    def forward(self, x):
        x = self.body(x)
        for layer in self.rest:
            x = layer(x)
        return x
"""
    assert operator_sequence(parse_program(code, "Net")) == (
        "linear",
        "tanh",
        "add",
        "softmax",
        "layernorm",
    )


NAMES = ["width", "depth", "first", "second", "hidden", "shifted", "total", "x", "scale"]


@settings(max_examples=40, deadline=None)
@given(
    st.permutations(["alpha", "x", "depth", "zz", "hidden", "w1", "_b", "Total", "first"]),
    st.integers(0, 3),
)
def test_names_and_white_space_never_matter(names, blank):
    renaming = dict(zip(NAMES, names, strict=True))
    tree = parse_source(TASK)
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr"):
            name = getattr(node, field, None)
            if (
                name in renaming
                and not (field == "attr" and not isinstance(node.value, ast.Name))
                and not isinstance(node, ast.keyword)
            ):
                setattr(node, field, renaming[name])
    code = ast.unparse(tree).replace("\n", "\n" * (blank + 1))
    assert canonical(code).normalised == canonical(TASK).normalised
    assert canonical(code).words == canonical(TASK).words
    assert operator_sequence(parse_program(code)) == SEQUENCE


HOSTILE = {
    "nothing": "",
    "no Python": "def (",
    "NUL": "x = 1\0",
    "nested parentheses": "x = " + "(" * 5000 + ")" * 5000,
    "long sum": "x = " + "+".join(["1"] * 30_000),
    "deep minus": "class Model:\n    def forward(self, x):\n        return " + "-" * 3000 + "x",
    "many statements": (
        "class Model:\n    def forward(self, x):\n"
        + "".join(f"        a{i} = x\n" for i in range(6000))
        + "        return x\n"
    ),
    "own base": "class Model(Model):\n    pass\n",
    "own wrapper": (
        "class Model:\n def __init__(self):\n  self.m = Model()\n\n def forward(self, x):\n  return"
        " self.m(x)\n"
    ),
    "huge power": (
        "N = 10 ** 10 ** 10\nM = 2 ** 99999999\nclass Model:\n    def forward(self, x):\n       "
        " return x * N\n"
    ),
    "growing product": "a = 9**9\n" + "a = a * a\n" * 200,
    "doubling": (
        "class Model:\n    def forward(self, x):\n"
        + "        x = [x, x]\n" * 200
        + "        return x\n"
    ),
    "surrogate": "x = '\ud800'\nclass Model:\n    pass\n",
    "too long": "#" * (CODE_LIMIT + 1),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_gets_a_form_or_none(code):
    first, second = canonical(code), canonical(code)
    assert first == second
    operator_sequence(parse_program(code))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_any_text_has_an_exact_form(text):
    assert canonical(text).exact == canonical(text + "  \n").exact or not text.strip()
