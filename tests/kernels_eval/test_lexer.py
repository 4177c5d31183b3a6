"""C++ and CUDA text: what is a comment, what a literal, and what a module's text shows of both."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.languages import languages_of
from kernels_eval.source.lexer import Kind, blank, tokens
from kernels_eval.source.module_text import visible_text

CASES = {
    "int a; // b": "int a;     ",
    "a // b \\\nc\nd": "a       \n \nd",
    "a /* b\nc */ d": "a     \n     d",
    'f("a // b");': "f(        );",
    'R"x(/* " )x" y': "             y",
    "1'000'000 / 'c'": "1'000'000 /    ",
    "0x1'0 'a'": "0x1'0    ",
    "u8\"a\" L'b'": "          ",
    'a \\" b': 'a \\" b',
    "a /* never closed": "a /* never closed",
    'a R"(never closed': 'a R"(never closed',
    "a /*/ b */ c": "a          c",
}


@pytest.mark.parametrize("text, expected", CASES.items())
def test_comments_and_literals_become_spaces(text, expected):
    assert blank(text) == expected


def test_literals_can_stay():
    assert blank('#include "a.h" // b', literals=False) == '#include "a.h"     '


@given(st.text(alphabet="ab1'\"/*\\\nR(x)# ", max_size=60))
def test_every_place_and_line_stays(text):
    found = blank(text)
    assert len(found) == len(text)
    assert [at for at, letter in enumerate(text) if letter == "\n"] == [
        at for at, letter in enumerate(found) if letter == "\n"
    ]


@pytest.mark.parametrize("part", ["/*", '"', "'", 'R"(', '\\"', "1'", 'R"a', "//"])
def test_time_grows_with_the_text_only(part):
    def seconds(times):
        started = time.process_time()
        blank(part * times)
        return time.process_time() - started

    seconds(1000)
    # twenty times the text; a quadratic pattern takes four hundred times the time
    assert seconds(100_000) < 100 * max(seconds(5_000), 0.001)


def test_names_and_numbers_are_whole():
    found = [token.text for token in tokens("float4 v = 1e-5f; x->y")]
    assert found == ["float4", "v", "=", "1e-5f", ";", "x", "-", ">", "y"]
    assert {token.kind for token in tokens("a")} == {Kind.CODE}


IN_TWO_STRINGS = """
from torch.utils.cpp_extension import load_inline
names = ["kernels/*"]
ext = load_inline("x", cpp_sources="", cuda_sources="__global__ void f() {}", functions=["f"])
others = ["*/x"]
"""
BEHIND_A_COMMENT = '''
import triton
note = """// once @triton.jit, now __global__"""
@triton.jit
def kernel(): ...
'''


def test_a_comment_does_not_reach_from_one_string_into_another():
    assert [str(each) for each in languages_of(IN_TWO_STRINGS)] == ["cuda"]


def test_comments_of_a_native_source_say_nothing_about_the_language():
    assert [str(each) for each in languages_of(BEHIND_A_COMMENT)] == ["triton"]


@pytest.mark.parametrize(
    "code",
    ["x = '// a\\n__global__'", 'f"""\n// a\n{x} __global__"""', "a = 1 # __global__\n'", "\0"],
)
def test_text_that_is_hard_to_read_is_read(code):
    assert ("__global__" in visible_text(code)) is ("#" not in code and "\0" not in code)
    assert len(visible_text(code)) == len(code)


@pytest.mark.parametrize("character", ["\f", "\x1c", "\u2028"])
def test_a_character_that_ends_no_line_of_python_moves_nothing(character):
    code = f'x = "{character}"\n# hidden\ny = 1\n'
    assert visible_text(code) == code.replace("# hidden", " " * 8)
