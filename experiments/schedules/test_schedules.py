"""Swaps of machine code, and the transform that makes them. What nvdisasm itself says of each
instruction's registers (its life ranges) is the second opinion; nothing runs on a device."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from operator import ne
from pathlib import Path
from random import Random

import pytest

from experiments.schedules import operator, schedule
from experiments.schedules.schedule import WINDOW, Instruction, Swap, apply, blocks, neighbours
from experiments.schedules.transform import FLAG, SCHEDULES, asked_for
from kernels_eval.compile import cubins
from kernels_eval.config import EvalConfig
from kernels_eval.errors import UsageError
from kernels_eval.judge.prepare import confined_builder
from kernels_eval.source.spec import Build, ExtensionSpec, refused_flag

pytestmark = pytest.mark.slow
SOURCE = r"""
__global__ void mix(const float* __restrict__ a, const float* __restrict__ b, float* c, int n) {
  __shared__ float tile[32][33];
  float sum[4] = {};
  int i = threadIdx.x, row = blockIdx.x * 32;
  for (int k = 0; k < n; k += 32) {
    for (int j = i; j < 1024; j += 256) tile[j / 32][j % 32] = a[(row + j / 32) * n + k + j % 32];
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 32; ++q) {
      float v = b[(k + q) * n + i];
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[r] += tile[(i / 32) * 4 + r][q] * v;
    }
    __syncthreads();
  }
  for (int r = 0; r < 4; ++r)
    c[(row + (i / 32) * 4 + r) * n + i] = sum[r] > 0.f ? tanhf(sum[r]) : expm1f(sum[r]);
}
__global__ void pairs(const double2* a, double* c, const int* which, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  double2 v = a[which[i]];
  c[i] = fma(v.x, v.y, c[i]) + (double)(i % 7);
}
extern "C" void run(float* a, float* b, float* c, double2* d, double* e, int* w, int n) {
  mix<<<n / 32, 256>>>(a, b, c, n);
  pairs<<<n, 256>>>(d, e, w, n);
}
"""


def compiled(folder: Path, *flags: str, arch: int = 90, source: str = "") -> Path:
    library = folder / f"kernels_{arch}{len(flags)}{source}.so"
    (folder / "kernels.cu").write_text(SOURCE)
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [
        "nvcc",
        code,
        "-shared",
        "-Xcompiler",
        "-fPIC",
        *flags,
        folder / (source or "kernels.cu"),
    ]
    subprocess.run([*command, "-o", library], check=True, capture_output=True)
    return library


def listing(library: Path) -> str:
    done = subprocess.run(schedule.command(library), capture_output=True, text=True)
    return done.stdout


def tool(name: str) -> str:
    found = cubins.tool_path(name, *(Path(place) / "nvidia/cu13/bin" for place in sys.path))
    if found is None:
        pytest.skip(f"{name} is not here")
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    for name in ("nvcc", "cuobjdump"):
        tool(name)
    return compiled(tmp_path_factory.mktemp("schedule"))


@pytest.fixture(scope="module")
def held(library) -> list[tuple[str, list[Instruction]]]:
    return list(blocks(library, listing(library)))


@pytest.fixture(scope="module")
def swaps(library) -> list[Swap]:
    found = list(neighbours(library, listing(library)))
    assert len(found) > 5
    return found


def sections(cubin: Path) -> dict[str, int]:
    """The places of a cubin's sections, by readelf."""
    command = ["readelf", "--wide", "--section-headers", cubin]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    lines = (re.search(r"\] (\.\S+) +\S+ +\w+ +(\w+)", line) for line in said.splitlines())
    return {each[1]: int(each[2], 16) for each in lines if each}


Ranges = dict[int, tuple[frozenset[str], frozenset[str]]]
KINDS = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}


def life_ranges(library: Path, tmp_path: Path) -> Ranges:
    """What nvdisasm says that each instruction, by its place in the file, reads and writes."""
    data: bytes = library.read_bytes()
    found: Ranges = defaultdict(lambda: (frozenset(), frozenset()))  # what never runs is not there
    subprocess.run([tool("cuobjdump"), "-xelf", "all", library], check=True, cwd=tmp_path)
    for cubin in tmp_path.glob("*.cubin"):
        start, places = data.index(cubin.read_bytes()), sections(cubin)
        command = [tool("nvdisasm"), "-c", "-plr", "-lrm", "narrow", cubin]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        kinds, starts = [], []
        for line in text.splitlines():
            if section := re.match(r"\s*\.section\s+(\.text\.[^,]+)", line):
                place = start + places[section[1]]
            columns = line.rpartition("//")[2].split("|")[1:-1]
            if any(name in line for name in ("GPR", "PRED")) and columns:
                kinds = [KINDS[each.strip(" -#").split()[0]] for each in columns]
            elif columns and all("#" in each for each in columns):
                starts = [each.index("#") + 2 for each in columns]
            elif at := re.match(r"\s+/\*([0-9a-f]{4,})\*/", line):
                marks = [
                    (f"{kind}{number}", mark)
                    for kind, begin, column in zip(kinds, starts, columns, strict=True)
                    for number, mark in enumerate(column[begin:])
                ]
                reads = frozenset(name for name, mark in marks if mark in "vx")
                writes = frozenset(name for name, mark in marks if mark in "^x")
                found[place + int(at[1], 16)] = reads, writes
    return found


def test_registers_are_at_least_those_of_nvdisasm(library, held, tmp_path):
    ranges, compared = life_ranges(library, tmp_path), 0
    for _, block in held:
        for each in block:
            reads, writes = ranges[each.offset]
            if each.name in schedule.MOVES:
                compared += 1
                assert reads <= each.reads | each.writes, (each, reads - each.reads)
                assert writes <= each.writes, (each, writes - each.writes)
    assert compared > 100


def edges(block: list[Instruction], ranges: Ranges) -> dict[tuple[bytes, bytes, str], int]:
    """Who reads whose value: (writer, reader, register) and the cycles between; instructions by
    their word and, of equal ones, by their number."""
    names, written, found, clock = Counter(), {}, {}, 0
    for each in block:
        names[each.word] += 1
        name = each.word + bytes([names[each.word] % 256])
        reads, writes = ranges[each.offset]
        for register in reads:
            writer, began, one = written.get(register, (b"before", -WINDOW, None))
            found[writer, name, register] = clock - began, one, each
        written |= dict.fromkeys(writes, (name, clock, each))
        clock += each.stall
    return found


def waited(block: list[Instruction]) -> dict[bytes, set[int]]:
    """Of each instruction, those before it (by number in the block) whose barrier it or another
    has waited for when it begins."""
    names, pending, done, found = Counter(), {}, set(), {}
    for each in block:
        names[each.word] += 1
        for number in each.waits:
            done |= pending.pop(number, set())
        found[each.word + bytes([names[each.word] % 256])] = set(done)
        for number in each.sets:
            pending.setdefault(number, set()).add(each.word)
    return found


def back(made: Swap) -> Swap:
    """What undoes a swap."""
    first, second = made.first, made.second
    moved = replace(second, offset=first.offset), replace(first, offset=second.offset)
    return Swap(made.kernel, *moved)


def test_a_swap_keeps_who_depends_on_whom(library, held, swaps, tmp_path):
    ranges = life_ranges(library, tmp_path)
    around = {each.offset: block for _, block in held for each in block}
    fewest: dict[tuple[str, str], int] = {}
    for block in {id(b): b for b in around.values()}.values():
        for cycles, one, other in edges(block, ranges).values():
            if one:
                key = one.name, other.name
                fewest[key] = min(cycles, fewest.get(key, WINDOW))
    for swap in swaps:
        block, turn = around[swap.first.offset], back(swap)
        index = next(i for i, each in enumerate(block) if each.offset == swap.first.offset)
        turned = [*block[:index], turn.first, turn.second, *block[index + 2 :]]
        moved = ranges.copy()
        moved[turn.first.offset], moved[turn.second.offset] = (
            ranges[swap.second.offset],
            ranges[swap.first.offset],
        )
        before, after = edges(block, ranges), edges(turned, moved)
        assert before.keys() == after.keys(), swap
        for key, (cycles, one, other) in after.items():
            if one and cycles < before[key][0]:
                assert cycles >= fewest[one.name, other.name], (swap, one, other)
        early, late = waited(block), waited(turned)
        for (_, reader, _), (_, one, _) in before.items():
            if one and one.sets:
                assert (one.word in early[reader]) <= (one.word in late[reader]), swap


def test_patched_libraries_hold_the_same_instructions_and_can_be_undone(
    library, held, swaps, tmp_path
):
    texts = Counter(each.word for _, block in held for each in block)
    for swap in swaps[:: max(1, len(swaps) // 6)]:
        patched = shutil.copy(library, tmp_path / "patched.so")
        apply(patched, swap)
        found = [each for _, block in blocks(patched, listing(patched)) for each in block]
        assert Counter(each.word for each in found) == texts
        there = {each.offset: each.word for each in found}
        assert there[swap.first.offset] == swap.second.word
        assert there[swap.second.offset] == swap.first.word
        changed = zip(library.read_bytes(), patched.read_bytes(), strict=True)
        places = [at for at, (one, other) in enumerate(changed) if one != other]
        assert swap.first.offset <= places[0] and places[-1] < swap.second.offset + 16
        with pytest.raises(UsageError, match="does not hold the instructions"):
            apply(patched, swap)
        apply(patched, back(swap))
        assert patched.read_bytes() == library.read_bytes()


def instruction(operation, operands, *, write=7, read=7):
    """A word with these barriers, and a stall of one cycle."""
    word = (1 | write << 5 | read << 8) << 105
    return Instruction(0, "", operation, operands, word.to_bytes(16, "little"))


def test_loads_without_a_barrier_stay_before_the_one_that_has_it():
    """Loads end in order: only the last of several may set the barrier that is waited for."""
    silent = instruction("LDS.128", "R12, [R3+0x40]")
    last = instruction("LDS.128", "R20, [R6]", write=0)
    assert last.ties(silent) and silent.ties(last)
    own = instruction("LDS.128", "R24, [R9]", write=1)
    assert not last.ties(own) and not silent.ties(instruction("FFMA", "R1, R2, R2, R2"))


def test_kinds_of_results_are_there_at_times_of_their_own():
    wide = instruction("IMAD.WIDE", "R4, R2, R3, RZ")
    plain = instruction("IMAD", "R4, R2, R3, RZ")
    sum_ = instruction("FADD", "R9, R4, R4")
    assert schedule.nearest_of([[plain, sum_]]).keys() != schedule.nearest_of([[wide, sum_]]).keys()
    carry = instruction("IADD3", "R4, P0, R2, R3, RZ")
    uses = [
        instruction("IADD3.X", "R6, R4, R7, RZ, !PT, !PT"),
        instruction("SEL", "R6, R7, R8, P0"),
    ]
    assert [each.ties(carry) for each in uses] == [
        ["read R"],
        ["read P", "write P", "overwrite"],
    ]


def test_a_library_without_such_code_is_refused(library, tmp_path):
    other = compiled(tmp_path, arch=80)
    with pytest.raises(UsageError, match="holds no code for sm_90"):
        list(neighbours(other, listing(other)))
    packed = compiled(tmp_path, "--compress-mode=size")
    with pytest.raises(UsageError, match="is compressed"):
        list(neighbours(packed, listing(packed)))
    (tmp_path / "text.so").write_bytes(b"\x50\xed\x55\xba" * 9)
    with pytest.raises(UsageError, match="holds no code"):
        list(neighbours(tmp_path / "text.so", listing(tmp_path / "text.so")))


JUMPS = """
__global__ void chosen(float* x, int n) {
  switch (n) {
    case 0: x[0] = 1; break;
    case 1: x[1] = x[2] * 3; break;
    case 2: x[3] = 2 * x[n]; break;
    case 3: x[5] = x[4] + 2; break;
    case 4: x[6] = 3; break;
    case 5: x[7] = x[8] - x[9];
  }
}
"""


def test_what_is_relocated_or_jumps_to_an_address_in_a_register_stays(library, tmp_path):
    (tmp_path / "moved.cu").write_text(SOURCE.replace("int i =", "static int y; y += n; int i ="))
    moved = compiled(tmp_path, "-rdc=true", source="moved.cu")
    assert "mix" not in {swap.kernel for swap in neighbours(moved, listing(moved))}
    (tmp_path / "jumps.cu").write_text(JUMPS)
    jumps = compiled(tmp_path, source="jumps.cu")
    assert "BRX" in listing(jumps) and not list(blocks(jumps, listing(jumps)))


def test_the_flag_of_a_source_says_which_swaps_its_library_has(tmp_path):
    tool("nvcc"), tool("cuobjdump")
    config = EvalConfig(build={"lite_headers": False, "timeout_s": 900})
    transforms = {"schedules": SCHEDULES}
    builder = confined_builder(config, tmp_path / "cache", "9.0", transforms)
    cuda = SOURCE.replace('extern "C" ', "")
    spec = {"kind": "files", "name": "swapped", "files": (("k.cu", cuda),), "python_module": False}

    def built(*flags: str) -> Build:
        return builder.build(ExtensionSpec(**spec, extra_cuda_cflags=flags))

    plain, one, again = built(), built(f"{FLAG}3"), built(f"{FLAG}3_40000")
    assert plain.ok and one.ok and again.ok, (plain.log, one.log, again.log)
    words = [code(Path(build.path)) for build in (plain, one, again)]
    assert Counter(words[0]) == Counter(words[1]) == Counter(words[2])
    assert [sum(map(ne, *pair)) for pair in pairwise(words)] in ([2, 2], [2, 3])
    assert built(f"{FLAG}3").cached


def code(library: Path) -> list[bytes]:
    return [each.word for _, block in blocks(library, listing(library)) for each in block]


@pytest.mark.parametrize("wrong", ["", "x", "1__2", "-1", "_".join("1" * 65)])
def test_a_flag_that_names_no_swaps_is_refused(wrong):
    with pytest.raises(UsageError, match="numbers between underscores"):
        asked_for([FLAG + wrong])


def test_the_operator_adds_a_swap_to_one_flag_that_any_compiler_takes():
    text = "import x\nx.load_inline(name='k', extra_cuda_cflags=['-O2', '-w'])"
    once, said = operator.swap(text, "cuda", Random(0), {})
    twice, _ = operator.swap(once, "cuda", Random(1), {})
    lists = [ast.literal_eval(re.search(r"\[.*\]", made)[0]) for made in (once, twice)]
    (*kept, one), (*still, two) = lists
    assert kept == still == ["-O2", "-w"] and refused_flag([two]) is None
    assert two.startswith(f"{one}_") and len(asked_for([two])) == 2
    assert said == f"swap {asked_for([one])[0]}"
    assert (
        operator.swap(text, "cpp", Random(0), {})
        is None
        is operator.swap("x = (", "cuda", Random(0), {})
    )
