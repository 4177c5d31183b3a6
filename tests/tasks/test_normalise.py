"""Canonical forms and operator sequences: what they do not see, and what they must."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.source.syntax import parse_source
from tasks.decontamination.normalise import CODE_LIMIT, canonical, parse_program
from tasks.decontamination.operator_sequence import operator_sequence
from tests.support.cases import cases

CASES = cases("decontamination")
TASK, SEQUENCE = CASES["task"], tuple(CASES["sequence"].split())


def changed(*pairs):
    code = TASK
    for old, new in pairs:
        assert old in code
        code = code.replace(old, new)
    return code


@pytest.mark.parametrize("pairs", CASES["same"].values(), ids=CASES["same"])
def test_what_does_not_change_the_program_does_not_change_its_form(pairs):
    code = changed(*pairs)
    assert canonical(code).exact != canonical(TASK).exact
    assert canonical(code).normalised == canonical(TASK).normalised
    assert operator_sequence(parse_program(code)) == SEQUENCE


@pytest.mark.parametrize("pairs", CASES["other"].values(), ids=CASES["other"])
def test_another_program_has_another_form_whatever_its_sizes(pairs):
    code = changed(*pairs)
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
