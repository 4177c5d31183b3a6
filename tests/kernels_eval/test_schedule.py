"""Swaps of machine code. What nvdisasm itself says of each instruction's registers (its life
ranges) is the second opinion; nothing runs on a device."""

import re
import shutil
import subprocess
from collections import Counter, defaultdict

import pytest

from kernels_eval.build import schedule
from kernels_eval.build.schedule import WINDOW, apply, blocks, neighbours
from kernels_eval.errors import ToolchainError, UsageError

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


def compiled(folder, *flags, arch=90):
    source, library = folder / "kernels.cu", folder / f"kernels_{arch}{len(flags)}.so"
    source.write_text(SOURCE)
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = ["nvcc", code, "-shared", "-Xcompiler", "-fPIC", *flags, source, "-o", library]
    subprocess.run(command, check=True, capture_output=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not here")
    try:
        schedule.nvdisasm()
    except ToolchainError as error:
        pytest.skip(str(error))
    return compiled(tmp_path_factory.mktemp("schedule"))


@pytest.fixture(scope="module")
def swaps(library):
    found = list(neighbours(library))
    assert len(found) > 5
    return found


Ranges = dict[int, tuple[frozenset[str], frozenset[str]]]
KINDS = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}


def life_ranges(library, tmp_path):
    """What nvdisasm says that each instruction, by its place in the file, reads and writes."""
    data = library.read_bytes()
    found = defaultdict(lambda: (frozenset(), frozenset()))  # what never runs is not there
    for start, size in schedule._cubins(data, library):
        cubin = tmp_path / "one.cubin"
        cubin.write_bytes(data[start : start + size])
        places, _ = schedule._sections(cubin.read_bytes())
        command = [schedule.nvdisasm(), "-c", "-plr", "-lrm", "narrow", cubin]
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


def test_registers_are_at_least_those_of_nvdisasm(library, tmp_path):
    ranges, compared = life_ranges(library, tmp_path), 0
    for _, block in blocks(library):
        for each in block:
            reads, writes = ranges[each.offset]
            if each.name in schedule._MOVES:
                compared += 1
                assert reads <= each.reads | each.writes, (each.text, reads - each.reads)
                assert writes <= each.writes, (each.text, writes - each.writes)
    assert compared > 100


def edges(block, ranges):
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


def waited(block):
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


def test_a_swap_keeps_who_depends_on_whom(library, swaps, tmp_path):
    data, ranges = library.read_bytes(), life_ranges(library, tmp_path)
    held = {each.offset: block for _, block in blocks(library) for each in block}
    fewest = {}
    for block in {id(b): b for b in held.values()}.values():
        for cycles, one, other in edges(block, ranges).values():
            if one:
                key = one.name, other.name
                fewest[key] = min(cycles, fewest.get(key, WINDOW))
    for swap in swaps:
        block = held[swap.first.offset]
        index = next(i for i, each in enumerate(block) if each.offset == swap.first.offset)
        back = swap.reversed
        turned = [*block[:index], back.first, back.second, *block[index + 2 :]]
        moved = ranges.copy()
        moved[back.first.offset], moved[back.second.offset] = (
            ranges[swap.second.offset],
            ranges[swap.first.offset],
        )
        before, after = edges(block, ranges), edges(turned, moved)
        assert before.keys() == after.keys(), swap
        for key, (cycles, one, other) in after.items():
            if one and cycles < before[key][0]:
                assert cycles >= fewest[one.name, other.name], (swap, one.text, other.text)
        early, late = waited(block), waited(turned)
        for (_, reader, _), (_, one, _) in before.items():
            if one and one.sets:
                assert (one.word in early[reader]) <= (one.word in late[reader]), swap
        assert data[swap.first.offset :][:16] == swap.first.word


def test_patched_libraries_hold_the_same_instructions_and_can_be_undone(library, swaps, tmp_path):
    texts = Counter(each.word for _, block in blocks(library) for each in block)
    for swap in swaps[:: max(1, len(swaps) // 6)]:
        patched = apply(library, swap, tmp_path / "patched.so")
        found = [each for _, block in blocks(patched) for each in block]
        assert Counter(each.word for each in found) == texts
        there = {each.offset: each.text for each in found}
        assert there[swap.first.offset] == swap.second.text
        assert there[swap.second.offset] == swap.first.text
        changed = zip(library.read_bytes(), patched.read_bytes(), strict=True)
        places = [at for at, (one, other) in enumerate(changed) if one != other]
        assert swap.first.offset <= places[0] and places[-1] < swap.second.offset + 16
        with pytest.raises(UsageError, match="does not hold the instructions"):
            apply(patched, swap)
        apply(patched, swap.reversed)
        assert patched.read_bytes() == library.read_bytes()


def test_what_must_stay_never_moves(swaps):
    """Branches, barriers, shuffles and reads of clocks, and two accesses of which one writes."""
    for swap in swaps:
        pair = {swap.first.name, swap.second.name}
        assert not pair & set("BAR BRA EXIT SHFL S2R CS2R MEMBAR ATOMG RED BSSY DEPBAR".split())
        assert not (pair & {"STG", "STS"} and pair <= {"STG", "STS", "LDG", "LDS"}), swap


def test_a_library_without_such_code_is_refused(library, tmp_path):
    with pytest.raises(UsageError, match="holds no code for sm_90"):
        list(neighbours(compiled(tmp_path, arch=80)))
    packed = compiled(tmp_path, "--compress-mode=size")
    with pytest.raises(UsageError, match="is compressed"):
        list(neighbours(packed))
    (tmp_path / "text.so").write_bytes(b"\x50\xed\x55\xba" * 9)
    with pytest.raises(UsageError, match="holds no code"):
        list(neighbours(tmp_path / "text.so"))


def test_without_nvdisasm_the_fix_is_named(library, monkeypatch):
    monkeypatch.setattr(schedule.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
        list(neighbours(library))
