"""Which numbers of a source are parameters, and that all others stay as they are."""

import ast
from random import Random

import pytest

from kernels_eval.records import Language
from kernels_eval.source.spec import refused_flag
from kernels_eval.source.syntax import parse_source
from tasks.search import flags
from tasks.search.parameters import changed, parameters_of, usage, with_values
from tests.support.cases import cases

CUDA, CPP, TRITON = Language.CUDA, Language.CPP, Language.TRITON


def module(source, before="", keywords=""):
    return (
        f'import torch\n{before}\nsource = r"""\n#include <torch/extension.h>\n{source}\n"""\n'
        f"ext = load_inline(name='k', cuda_sources=source, functions=['f']{keywords})\n"
    )


def found(source, language=CUDA, **options):
    """Parameters by name, but for loops without a pragma."""
    every = parameters_of(module(source, **options), language)
    return {each.name: each.value for each in every if not each.name.startswith("loop")}


def put(source, language=CUDA, **values):
    """The native source with other values."""
    code = module(source)
    named = {name.replace("_number_", " #"): value for name, value in values.items()}
    text = with_values(code, parameters_of(code, language), named)
    parse_source(text)
    return text.split("extension.h>\n")[1].split('\n"""')[0]


REDUCTION = """__global__ void __launch_bounds__(256) f(const float* x, int n) {
    __shared__ float s[256];  // 256 floats
    int i = blockIdx.x * 256 + threadIdx.x;
}
void f(torch::Tensor x) {
    int hidden = 256;
    printf("256 threads");
    f<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), 256);
}"""


def test_a_literal_block_is_changed_with_grid_shared_array_and_bounds_and_nothing_else():
    assert found(REDUCTION) == {"block": 256}
    after = put(REDUCTION, block=128)
    assert "__launch_bounds__(128)" in after and "__shared__ float s[128];  // 256 floats" in after
    assert "f<<<(n + 127) / 128, 128>>>(x.data_ptr<float>(), 256);" in after
    assert "int hidden = 256;" in after and '"256 threads"' in after
    assert "blockIdx.x * 256" in after  # means nothing that syntax could tell: the verifier will


@pytest.mark.parametrize(
    "source, names",
    cases("search")["constants"],
)
def test_constants_are_parameters_by_name_and_pragmas_by_kind(source, names):
    assert found(source) == names


def test_what_a_launch_names_is_found_where_it_is_declared():
    source = """void a() { const int threads = 128; k<<<blocks, threads, 0, stream>>>(256); }
void b() { int threads = 512; dim3 block(threads); k<<<grid, block>>>(); }
void c() { dim3 block(16, 16, 1); k<<<grid, block>>>(16); }
void d() { k<<<dim3(1, 2), dim3(TX, 8)>>>(); }
#define TX 32
void e() { k<<<dim3(1, 2), dim3(TX, TX)>>>(); k<<<g, n>>>(); }"""
    names = {
        "threads": 128,
        "threads #2": 512,
        "block": 16,
        "block #2": 16,
        "block #3": 8,
        "TX": 32,
    }
    assert found(source) == names
    after = put(source, threads=64, threads_number_2=1024, block=8, TX=16)
    assert "threads = 64; k<<<blocks, threads, 0, stream>>>(256)" in after
    assert "threads = 1024; dim3 block(threads)" in after
    assert "dim3 block(8, 16, 1); k<<<grid, block>>>(16)" in after and "#define TX 16" in after


def test_no_block_of_more_threads_than_cuda_takes_is_among_the_values():
    source = "#define T 16\nvoid f() { k<<<g, dim3(T, T)>>>(); k<<<g, dim3(32, 8)>>>(); }"
    values = {each.name: each.values for each in parameters_of(module(source), CUDA)}
    assert max(values["T"]) == 32  # squared
    assert max(values["block"]) == 128 and max(values["block #2"]) == 32


def test_template_arguments_are_known_by_the_names_of_their_parameters():
    source = """template <typename T, int BLOCK, int DIM> __global__ void k(T* x) {}
void f() { k<float, 128, 64><<<grid, 128>>>(x); }"""
    assert found(source) == {"block": 128}  # one number, for both say how many threads there are
    assert "k<float, 64, 64><<<grid, 64>>>" in put(source, block=64)
    assert found(source.replace("grid, 128", "grid, 256")) == {"BLOCK": 128, "block": 256}


def test_numbers_that_two_kernels_share_are_changed_together():
    source = """__global__ void a() { __shared__ float s[256]; }
__global__ void b() { __shared__ float s[256]; }
void f() { a<<<(n + 255) / 256, 256>>>(); b<<<(m + 255) / 256, 256>>>(); }"""
    assert found(source) == {"block": 256}
    assert "256" not in put(source, block=64) and "255" not in put(source, block=64)


def test_a_square_block_is_changed_with_its_tile_and_grid_and_stays_square():
    source = """__global__ void t() { __shared__ float s[16][17], k[8][16]; }
void f() { dim3 block(16, 16), d; dim3 b2(32, 8); dim3 grid((w + 15) / 16, (h + 15) / 16);
dim3 block2(16, 16); t<<<grid, block2>>>(); u<<<dim3((w + 31) / 32, (h + 7) / 8), b2>>>(); }"""
    every = {each.name: each for each in parameters_of(module(source), CUDA)}
    assert list(every) == ["block", "block #2", "block #3"]
    after = put(source, block_number_3=32, block_number_2=4)
    assert "s[32][33], k[8][32];" in after and "grid((w + 31) / 32, (h + 31) / 32)" in after
    assert "block2(32, 32)" in after and "b2(32, 4)" in after and "(h + 3) / 4" in after
    assert max(every["block #3"].values) == 32


def test_loops_get_pragmas_inside_kernels_alone_and_lose_them_again():
    source = """__device__ float g(float x) { for (int i = 0; i < 3; ++i) x += i; return x; }
__global__ void k() {
    int a; for (int i = 0; i < 8; ++i) { if (i) for (;;) {} }
}
void host() { for (int i = 0; i < 3; ++i) k<<<1, n>>>(); }"""
    code = module(source)
    every = parameters_of(code, CUDA)
    assert [each.name for each in every] == ["loop unroll", "loop unroll #2"]
    after = with_values(code, every, {"loop unroll": 4, "loop unroll #2": 0})
    assert after.count("#pragma unroll 4\nfor (int i = 0; i < 3") == 1 == after.count("#pragma")
    again = parameters_of(after, CUDA)
    assert with_values(after, again, {"unroll": 1}).count("#pragma unroll 1\n") == 1


def test_macros_get_no_pragmas():
    macros = """#define ONE(x) { for (;;) x; }
#define KERNEL(T) \\
__global__ void k_##T() { \\
    int a; for (;;) { } }
KERNEL(float)"""
    assert parameters_of(module(macros), CUDA) == []
    (loop,) = parameters_of(module(macros + "\n__global__ void k() { for (;;) {} }"), CUDA)
    assert loop.name == "loop unroll"


def test_cpp_loops_get_the_compilers_own_pragma():
    after, said = changed(module("void f() { int a; for (;;) {} }"), CPP, Random(0))
    assert "#pragma GCC unroll" in after and said.startswith("loop unroll 0 -> ")


def test_numbers_of_the_python_around_it_are_left_alone():
    before = "BLOCK = 64\ntext = 'const int BLOCK = 64;'\ndoc = '''#define TILE 8'''"
    assert found("const int TILE = 8;", before=before) == {"TILE": 8}
    doc = '"""A __global__ kernel.\n\nconst int BLOCK = 64;\n"""\n'
    assert parameters_of(doc + f"def f():\n    # why\n    {doc}", CUDA) == []


def test_places_are_right_behind_wide_characters_and_in_one_line_strings():
    code = 'x = "é\\u2028"; y = "ü"; s = "#include <a>\\nconst int TILE = 8; for (;;) {}"\n'
    every = parameters_of(code, CPP)
    assert [(each.name, each.value) for each in every] == [("TILE", 8)]  # no room for a pragma
    assert "TILE = 16;" in with_values(code, every, {"TILE": 16})


def test_sources_that_python_formats_are_left_alone():
    code = (
        's = f"""#include <a>\nconst int TILE = 8; {N}"""\nt = rf"#include const int TILE = 8;"\n'
    )
    assert parameters_of(code, CPP) == []


def test_modules_that_do_not_parse_have_no_parameters():
    for code in ("x = (", 's = """#include', "\x00", ""):
        assert parameters_of(code, CUDA) == [] and changed(code, CUDA, Random(0)) is None
        assert flags.changed(code, CUDA, Random(0)) is None and usage(code, CUDA) == 0


def test_the_same_draw_changes_the_same():
    code = module(REDUCTION)
    assert changed(code, CUDA, Random(3)) == changed(code, CUDA, Random(3))
    drawn = {changed(code, CUDA, Random(seed))[0] for seed in range(30)}
    assert len(drawn) == 5 and code not in drawn  # the other sizes of a block


def test_shared_memory_is_counted_where_its_extents_are_known():
    source = """#define TILE 16
__global__ void k() { __shared__ float a[TILE][TILE + 1]; __shared__ double b[8], e[2]; }
__global__ void l() { __shared__ half c[n]; extern __shared__ float d[]; }"""
    assert usage(module(source), CUDA) == 16 * 16 + 8 + 2
    assert usage(module("void f() {}"), CPP) < usage(module("void f() { int a; }"), CPP)


def test_every_flag_is_one_that_the_verifier_allows():
    for keyword, groups in map(dict.values, flags.CHOICES.values()):
        assert keyword.startswith("extra_")
        assert refused_flag([flag for group in groups for flag in group]) is None


@pytest.mark.parametrize("language", [CUDA, CPP])
@pytest.mark.parametrize("given", ["", ", extra_cuda_cflags=['-O2', '-w'], extra_cflags=['-O2']"])
def test_flags_change_in_their_list_alone(language, given):
    code = module("é", keywords=given)
    keyword, groups = flags.CHOICES[language].values()
    for seed in range(20):
        after, said = flags.changed(code, language, Random(seed))
        call = parse_source(after).body[-1].value
        lists = {each.arg: each.value for each in call.keywords if "flags" in each.arg}
        assert keyword in lists and after != code and " -> " in said
        one = ast.literal_eval(lists[keyword])
        assert all(sum(flag in one for flag in group) <= 1 for group in groups)
        if given and language is CUDA:
            assert "-w" in one and ast.literal_eval(lists["extra_cflags"]) == ["-O2"]


@pytest.mark.parametrize(
    "given", ["name=('k')", "'k', *more, functions=(['f'])", "name='k', **more"]
)
def test_flags_are_added_to_any_call_or_to_none(given):
    after = flags.changed(f"load_inline({given})", CPP, Random(0))
    if "**" in given:  # they may be among those
        assert after is None
    else:
        assert parse_source(after[0]).body[0].value.keywords[0].arg == "extra_cflags"


def test_flags_that_are_no_list_of_texts_are_left_alone():
    for given in (", extra_cflags=FLAGS", ", extra_cflags=['-O2', opt]"):
        assert flags.changed(module("", keywords=given), CPP, Random(0)) is None
    assert flags.changed(module(""), TRITON, Random(0)) is None
