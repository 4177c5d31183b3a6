"""Machine code in another order: swaps of two adjacent independent instructions of sm_90 in the
cubin of a built library, as SIP (arXiv 2403.10863) and CuAsmRL (arXiv 2501.08071) search over.

Guarantees, of every swap: both instructions are of a kind that may move (arithmetic, plain loads
and stores; nothing that branches, synchronises, or speaks to other threads), in one basic block of
a kernel without jumps to addresses in registers; neither reads or writes what the other writes
(registers, predicates, uniform ones, memory as a whole); each keeps its control bits; no
instruction comes nearer to one that it depends on than the compiler itself put two such operations
in the same library (for a register, or a predicate), by the stall counts, and else not within
`WINDOW` cycles; no wait that the second relied on is lost; and where an operation of variable
latency sets no barrier, since one behind it that ends later does, it stays before that one.
Does not guarantee that a swap gains anything, and nothing is known of the hardware beyond these
rules: a library with swaps is verified as any other.

An instruction is 16 bytes. The control bits are those that Jia et al. found on Volta (arXiv
1804.06826, chapter 2): stall cycles, yield, write and read barrier, barriers to wait for, reuse.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from kernels_eval.compile.cubins import cuobjdump
from kernels_eval.errors import ToolchainError, UsageError

WORD = 16
WINDOW = 15
"""Cycles within which the result of an instruction of fixed latency may not be there: the largest
stall count."""
ARCH = "sm_90"
Nearest = dict[tuple[str, str, str], int]
_FUNCTION = re.compile(r"Function : (\S+)\n(.*?)(?=Function : |\Z)", re.DOTALL)
_RELOCATED = re.compile(r"^\.section \.rela\.text\.(\S+)\s+RELA\n0x", re.MULTILINE)
_LINE = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<operation>[^\s;]+)\s*"
    r"(?P<operands>.*?)\s*;\s+/\* 0x(?P<low>[0-9a-f]{16}) \*/\s*\n"
    r"\s+/\* 0x(?P<high>[0-9a-f]{16}) \*/",
    re.MULTILINE,
)
_REGISTER = re.compile(r"\b(UR|R|UP|P)(\d+)(\.64)?")
MOVES = frozenset(
    """FADD FFMA FMUL FMNMX FSEL FSETP FCHK HADD2 HFMA2 HMUL2 HMNMX2 HSET2 HSETP2 IABS IADD3 IMAD
    IMNMX VIADD VIADDMNMX VIMNMX ISETP LEA LOP3 MOV PLOP3 PRMT SEL SHF SGXT BMSK MUFU POPC FLO BREV
    I2F I2FP F2I F2F F2FP DADD DFMA DMUL UIADD3 UIMAD ULEA ULOP3 UMOV USEL USHF UPRMT USETP UISETP
    LDC ULDC LDG LDS LDL STG STS STL""".split()
)
_LEAVES = frozenset("BRA JMP EXIT RET CALL BSYNC BREAK".split())
_JUMPS = frozenset("BRX BRXU JMX JMXU".split())
_IN_ORDER = frozenset(
    """LDC LDG LDS LDL STG STS STL MUFU POPC FLO BREV I2F F2I F2F FCHK DADD DFMA DMUL""".split()
)
"""Operations of variable latency: some set no barrier, and rely on that of a later one."""
_LOADS, _STORES = ("LDG", "LDS", "LDL"), ("STG", "STS", "STL")
_ORDERED = re.compile(r"\.(STRONG|MMIO|CONSTANT\.STRONG|ACQUIRE|RELEASE|VOLATILE)\b")
_WIDE = re.compile(r"\.(64|WIDE|HI|U64|S64|F64)\b|^D[A-Z]")


@dataclass(frozen=True)
class Instruction:
    """One word of a kernel, as cuobjdump names it; `offset` is in the file, `guard` its predicate.
    What it waits for and sets is in the word's control bits."""

    offset: int
    guard: str
    operation: str
    operands: str
    word: bytes

    @cached_property
    def control(self) -> int:
        return int.from_bytes(self.word, "little") >> 105

    @property
    def stall(self) -> int:
        return self.control & 0xF

    @property
    def sets(self) -> frozenset[int]:
        """Barriers that it sets; 7 is none."""
        return frozenset(self.barriers.values())

    @property
    def barriers(self) -> dict[str, int]:
        """Those that say that its result is there, and that its operands were read."""
        found = {"write": self.control >> 5 & 7, "read": self.control >> 8 & 7}
        return {name: number for name, number in found.items() if number != 7}

    @property
    def waits(self) -> frozenset[int]:
        return frozenset(number for number in range(6) if self.control >> (11 + number) & 1)

    @property
    def reuses(self) -> bool:
        return bool(self.control >> 17 & 0xF)

    @property
    def name(self) -> str:
        return self.operation.partition(".")[0]

    @cached_property
    def moves(self) -> bool:
        """Whether it may change places at all."""
        special = self.stall == 0 or self.reuses or _ORDERED.search(self.operation)
        return self.name in MOVES and not special

    @cached_property
    def reads(self) -> frozenset[str]:
        return self._registers(self.guard + self.operands)

    @cached_property
    def writes(self) -> frozenset[str]:
        """The first register, and every predicate that is an operand: some of them are read
        alone, which makes conflicts of what is none."""
        operands = self.operands.split(",")
        first = next((x for x in operands if re.match(r"\s*U?R\d|\s*U?RZ", x)), "")
        predicates = [x for x in operands if re.match(r"\s*!?U?P\d", x)]
        first = "" if self.name in _STORES else first
        return self._registers(",".join([first, *predicates]))

    def _registers(self, text: str) -> frozenset[str]:
        width = 4 if ".128" in self.operation else 2 if _WIDE.search(self.operation) else 1
        found: set[str] = set()
        for kind, number, pair in _REGISTER.findall(text):
            many = 1 if "P" in kind else max(width, 2 if pair else 1, 4 if "desc" in text else 1)
            found.update(f"{kind}{int(number) + index}" for index in range(many))
        return frozenset(found)

    def surely(self, other: Instruction) -> list[str]:
        """Why this one needs cycles behind `other`, without what `ties` only allows for: registers
        by their names alone."""
        reads, writes = self.named
        found = {
            **_by_kind("read", reads & other.named[1]),
            **_by_kind("write", writes & other.named[1]),
            "barrier": self.waits & other.sets,
        }
        return [name for name, held in found.items() if held]

    @cached_property
    def named(self) -> tuple[set[str], set[str]]:
        """Registers that are named as read, and as written: the predicates at the head, and the
        register behind them."""
        names = [_REGISTER.search(each) for each in self.operands.split(",")]
        plain = [found and found[1] + found[2] for found in names]
        head = next((i for i, name in enumerate(plain) if not name or "P" not in name), len(plain))
        end = 0 if self.name in _STORES else head + (not self.name.endswith(("SETP", "SETP2")))
        guard = _REGISTER.search(self.guard)
        reads = {name for name in plain[end:] if name} | ({guard[1] + guard[2]} if guard else set())
        return reads, {name for name in plain[:end] if name}

    def ties(self, other: Instruction) -> list[str]:
        """Why this one must stay behind `other`: registers, memory or barriers."""
        stores = {self.name, other.name} & set(_STORES)
        found = {
            **_by_kind("read", self.reads & other.writes),
            **_by_kind("write", self.writes & other.writes),
            "overwrite": self.writes & other.reads,
            "order": {self.name, other.name} <= _IN_ORDER
            and self.barriers.keys() != other.barriers.keys(),
            "memory": stores and {self.name, other.name} <= {*_LOADS, *_STORES},
            "barrier": (self.sets | self.waits) & other.sets or self.sets & other.waits,
        }
        return [name for name, held in found.items() if held]


def _by_kind(name: str, registers: Iterable[str]) -> dict[str, bool]:
    """A tie by registers, by their kind: a predicate is there later than another result."""
    return {f"{name} {kind}": True for kind in sorted({re.sub(r"\d", "", x) for x in registers})}


@dataclass(frozen=True)
class Swap:
    """Two adjacent instructions of a kernel of a library, in their present order."""

    kernel: str
    first: Instruction
    second: Instruction


# -- swaps -----------------------------------------------------------------------------------------


def reorder(library: Path, numbers: Sequence[int], listing: Callable[[], str]) -> None:
    """Make these swaps in a library; `listing` is what cuobjdump says of it as it is. Raises
    UsageError where the library allows none."""
    for number in numbers:
        found = list(neighbours(library, listing()))
        if not found:
            raise UsageError(f"{library.name} has no instructions that may be swapped")
        apply(library, found[number % len(found)])


def neighbours(library: Path, listing: str) -> Iterator[Swap]:
    """The swaps that a library's kernels allow, in the order of cuobjdump. Raises UsageError for a
    library without uncompressed code for sm_90."""
    found = list(blocks(library, listing))
    nearest = nearest_of([block for _, block in found])
    for kernel, block in found:
        for index in range(1, len(block) - 1):
            if _may_swap(block, index, nearest):
                yield Swap(kernel, block[index], block[index + 1])


def apply(library: Path, swap: Swap) -> Path:
    """Write the library with the two instructions in the other order, in its place.
    Raises UsageError where the library does not hold them there."""
    held = bytearray(library.read_bytes())
    at, pair = swap.first.offset, swap.first.word + swap.second.word
    if held[at : at + 2 * WORD] != pair or swap.second.offset != at + WORD:
        raise UsageError(
            f"{library} does not hold the instructions of this swap at {at:#x}",
            "take swaps of the library as it is: `neighbours`",
        )
    held[at : at + 2 * WORD] = swap.second.word + swap.first.word
    with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as file:
        file.write(held)
    shutil.copymode(library, file.name)
    return Path(file.name).replace(library)


def nearest_of(found: Iterable[Sequence[Instruction]]) -> Nearest:
    """The fewest cycles that the compiler put between two kinds of instructions of which the later
    depends on the earlier: what it does once is enough time."""
    nearest: Nearest = {}
    for block in found:
        for index, earlier in enumerate(block):
            for later, cycles in _window(block[index:]):
                for tie in later.surely(earlier):
                    key = (earlier.operation, later.operation, tie)
                    nearest[key] = min(cycles, nearest.get(key, WINDOW))
    return nearest


def _window(block: Sequence[Instruction]) -> Iterator[tuple[Instruction, int]]:
    """The instructions behind the first within WINDOW cycles, with their distance."""
    cycles = 0
    for one, other in pairwise(block):
        cycles += one.stall
        if cycles >= WINDOW:
            return
        yield other, cycles


def _may_swap(block: Sequence[Instruction], index: int, nearest: Nearest) -> bool:
    first, second = block[index : index + 2]
    if not (first.moves and second.moves) or block[index - 1].reuses:
        return False
    if second.ties(first) or first.ties(second) or first.waits - second.waits:
        return False
    # where the block begins or ends too near, what is beyond may be tied to them
    if sum(x.stall for x in block[:index]) < WINDOW:
        return False
    if first.stall + sum(x.stall for x in block[index + 2 :]) < WINDOW:
        return False
    turned = [*block[:index], second, first, *block[index + 2 :]]
    begins = (at for at in range(index + 2) if at != index)  # the second has gone the other way
    return all(
        cycles >= nearest.get((turned[at].operation, later.operation, tie), WINDOW)
        for at in begins
        for later, cycles in _window(turned[at:])
        if later in (first, second) or at == index + 1
        for tie in _timed(later.ties(turned[at]))
    )


def _timed(ties: Iterable[str]) -> list[str]:
    """Those that need cycles between: registers are read when an instruction begins, and memory is
    accessed in order."""
    return [tie for tie in ties if tie.split()[0] in ("read", "write", "barrier")]


# -- reading ---------------------------------------------------------------------------------------


def command(library: Path) -> list[str]:
    """What lists a library's instructions. Raises ToolchainError where there is no cuobjdump."""
    if (program := cuobjdump()) is None:
        raise ToolchainError("cuobjdump was not found", "pip install nvidia-cuda-cuobjdump")
    return [program, "--dump-sass", "--dump-elf", "--gpu-architecture", ARCH, str(library)]


def blocks(library: Path, listing: str) -> Iterator[tuple[str, list[Instruction]]]:
    """The basic blocks of every kernel for sm_90, as (kernel, instructions); a kernel that is
    relocated, or whose code is another one's, too, has none."""
    data, found = library.read_bytes(), False
    relocated = set(_RELOCATED.findall(listing))
    for kernel, body in _FUNCTION.findall(listing):
        lines = [match.groupdict(default="") for match in _LINE.finditer(body)]
        words = [bytes.fromhex(x.pop("high") + x.pop("low"))[::-1] for x in lines]
        place, found = data.find(code := b"".join(words)), True
        if place < 0:
            raise UsageError(
                f"the code in {library.name} is compressed", "build it without flags that compress"
            )
        fixed = kernel not in relocated and data.find(code, place + 1) < 0
        made = enumerate(zip(lines, words, strict=True))
        every = [Instruction(place + i * WORD, word=word, **x) for i, (x, word) in made]
        if fixed and not any(each.name in _JUMPS for each in every):
            yield from ((kernel, block) for block in _split(every))
    if not found:
        raise UsageError(f"{library} holds no code for {ARCH}", "build it for that architecture")


def _split(every: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """The instructions of a kernel, cut at what is jumped to and after what may leave the line."""
    targets = {
        int(number, 16) // WORD
        for each in every
        if each.name not in MOVES
        for number in re.findall(r"\b0x[0-9a-f]+0\b", each.operands)
    }
    cuts = {index + 1 for index, each in enumerate(every) if each.name in _LEAVES} | targets
    inside = sorted(cut for cut in cuts if 0 < cut < len(every))
    for begin, end in pairwise([0, *inside, len(every)]):
        yield list(every[begin:end])
