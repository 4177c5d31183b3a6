"""Canonical forms of a task's program, by which two tasks are compared.

Guarantees: static (the code is parsed, never run); the same form for programs that differ in
comments, docstrings, annotations, white space, import aliases, names of their own, order of
definitions and of independent statements, order and default values of torch's arguments, the way in
which the constructor gets its arguments, `F.relu(x)` for `torch.relu(x)` or `x.relu()`, `x + y` for
`torch.add(y, x)`, folded constants, unreachable code, or a wrapper that only delegates; never
raises, whatever the text. Does not guarantee that equal programs get equal forms: `torch.relu(x)`
and `nn.ReLU()(x)` differ here and meet only in `operator_sequence`. Code that does not parse has no
canonical form, only its text and the tokens of its text.
`tokens` says how a program is written down.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from kernels_eval.source.syntax import UNPARSABLE, parse_source
from tasks.decontamination.arguments import specialise
from tasks.decontamination.program import Function, Program, inlined
from tasks.decontamination.shapes import input_shapes
from tasks.decontamination.tokens import ALIKE, MARKS, Scope, Statement, is_noise

# Characters. `ast` takes about 400 bytes of memory a character, and no real task is near it.
CODE_LIMIT = 200_000
MAX_ORDERED_STATEMENTS = 200  # longer bodies keep their order: finding an order is quadratic
LARGEST_AXIS = 4  # whole numbers up to this are axes and exponents inside a method, not sizes
_WORD = re.compile(r"[A-Za-z_]\w{0,200}|\d[\w.]{0,200}|[^\w\s]")
_COMMENT = re.compile(r"#[^\n]*")
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Canonical:
    """What a program is compared by.

    `exact`, `normalised`, `shapes` and `resized` are hexadecimal digests; the last three are None
    where the code does not parse. `shapes` leaves out sizes, `resized` also every number that is an
    argument of the constructor, whatever it is for. `inputs` are the shapes of the inputs as
    tokens, or the numbers in get_inputs where the shapes cannot be read. `details` are the class's
    arguments by name that are no sizes, in order: axes, modes, switches. `words` are the tokens of
    the class alone, before arguments are put in their places, with names and numbers blanked;
    shingles are cut from them.
    `text_words` are the tokens of the text without comments, compared where a task does not parse.
    """

    exact: str
    text_words: Names
    normalised: str | None = None
    shapes: str | None = None
    resized: str | None = None
    inputs: Names = ()
    details: Names = ()
    words: Names = ()

    @property
    def parsed(self) -> bool:
        return self.normalised is not None


def canonical(code: str, entry_point: str = "Model", program: Program | None = None) -> Canonical:
    """The canonical forms of a task whose class is `entry_point`. `program` is its
    `specialised_program` where the caller has it already."""
    exact = digest(line.rstrip() for line in code.strip().splitlines())
    text_words = tuple(_WORD.findall(_COMMENT.sub("", code[:CODE_LIMIT])))
    program = program or specialised_program(code, entry_point)
    plain = parse_program(code, entry_point)
    with suppress(RecursionError):  # only hostile text is nested this deep
        if program and plain:
            forms = _Writer(program).forms()
            return Canonical(exact, text_words, *forms, _Writer(plain).words())
    return Canonical(exact, text_words)


def parse_program(code: str, entry_point: str = "Model") -> Program | None:
    """The program, or None where it is no Python, too long, or nested too deep."""
    if len(code) > CODE_LIMIT:
        return None
    try:
        return Program(parse_source(code), entry_point)
    except UNPARSABLE:
        return None


def specialised_program(code: str, entry_point: str = "Model") -> Program | None:
    """The program with its constants in their places (`arguments.specialise`)."""
    if program := parse_program(code, entry_point):
        with suppress(RecursionError):
            specialise(program)
    return program


def digest(parts: Iterable[str]) -> str:
    """A hash of some texts, as hexadecimal digits."""
    text = "\n".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


class _Writer:
    """Writes one program: definitions in the order in which they are reached, each body in
    canonical order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.index: dict[str, int] = {}
        self.hints: dict[str, str] = {}
        self.wanted: list[str] = []
        self.pieces: dict[str, list[str]] = {}

    def forms(self) -> tuple[str, str, str, Names, Names]:
        """`normalised`, `shapes`, `resized`, `inputs` and `details` of a Canonical."""
        program = self.program
        called = [] if program.constructed else self._pieces("get_init_inputs")
        inputs = input_shapes(program)
        drawn = [] if inputs else self._pieces("get_inputs")
        body = [*self._class_pieces(), *called]
        pieces = [*body, *drawn, list(inputs or ())]
        whole = [token for tokens in pieces for token in ("def", *map(_plain, tokens))]
        shapes, resized = (
            [token for tokens in body for token in ("def", *_without_sizes(tokens, blank))]
            for blank in ("~", "^~")
        )
        found = inputs or tuple(t for tokens in drawn for t in tokens if t[0] == "#")
        digests = [digest(_numbered(each)) for each in (whole, shapes, ["resized", *resized])]
        return digests[0], digests[1], digests[2], found, _details(shapes)

    def words(self) -> tuple[str, ...]:
        """`words` of a Canonical."""
        tokens = (token for piece in self._class_pieces() for token in piece)
        return tuple(token[0] if token[0] in "$#" else token for token in tokens)

    def _class_pieces(self) -> list[list[str]]:
        entry = self.program.chain[-1]
        self._hint(entry)
        return self._pieces(f"{entry}.forward", f"{entry}.__init__")

    def _pieces(self, *units: str) -> list[list[str]]:
        """The tokens of some units and of everything that they reach and no earlier one did."""
        self.wanted = [*units]
        for unit in self.wanted:  # grows while it is read
            if unit not in self.pieces:
                self.pieces[unit] = self._unit(unit)
        return [self.pieces.pop(unit) for unit in dict.fromkeys(self.wanted) if unit in self.pieces]

    def _hint(self, entry: str) -> None:
        """Note what each attribute is built from, to order statements that use attributes not named
        yet."""
        unit = f"{entry}.__init__"
        init, scope = self.program.functions.get(unit), Scope(self.program, unit)
        for statement in init.body if init else ():
            match statement:
                case ast.Assign([target], value):
                    tokens = ("$" if token[0] == "$" else token for token in scope.tokens(value))
                    hint = f"${' '.join(tokens)}"
                    for token in scope.tokens(target):
                        self.hints.setdefault(token, hint)

    def _unit(self, unit: str) -> list[str]:
        """The tokens of a function, of a class reached by name, or of what a module's variable is
        made of. Everything that it reaches is wanted next."""
        scope, out = Scope(self.program, unit), []
        if scope.function:
            out = self._function(scope, scope.function)
        elif node := self.program.classes.get(unit):
            self.wanted += [f"{unit}.forward", f"{unit}.__init__"]
            own = (each for each in node.body if not isinstance(each, Function))
            parts = [*node.bases, *(each for each in own if not is_noise(each))]
            out = [token for part in parts for token in scope.tokens(part)]
        elif value := self.program.variables.get(unit):
            out = scope.tokens(value)
        self.wanted += [name for name in scope.reached if name not in self.wanted]
        return out

    def _function(self, scope: Scope, function: Function) -> list[str]:
        body = [node for node in function.body if not is_noise(node)]
        if not body:
            return []
        out = scope.signature(function)
        self._learn(out)
        scope.inlined, body = inlined(body)
        for statement in self._ordered([scope.statement(node) for node in body]):
            out += statement.tokens
        return out

    def _ordered(self, statements: list[Statement]) -> Iterator[Statement]:
        """Statements in the least order that their reads and writes allow, by tokens that no choice
        of names changes."""
        left = list(statements)
        if len(left) > MAX_ORDERED_STATEMENTS:
            yield from left
            return
        while left:
            ready = [
                each
                for i, each in enumerate(left)
                if not any(each.depends_on(earlier) for earlier in left[:i])
            ]
            chosen = ready[0] if len(ready) == 1 else min(ready, key=self._key)
            left = [each for each in left if each is not chosen]
            self._learn(chosen.tokens)
            yield chosen

    def _key(self, statement: Statement) -> tuple[list[str], list[str]]:
        """A known name is its number, an unknown attribute what it is built from, any other name
        nothing. Sizes decide last."""
        named = [
            f"${self.index[t]}" if t in self.index else self.hints.get(t, "$") if t[0] == "$" else t
            for t in statement.tokens
        ]
        return [_numberless(token) for token in named], named

    def _learn(self, tokens: list[str]) -> None:
        for token in tokens:
            if token[0] == "$":
                self.index.setdefault(token, len(self.index))


def _numbered(tokens: Sequence[str]) -> Iterator[str]:
    """The tokens with own names replaced by their order of appearance."""
    seen: dict[str, int] = {}
    for token in tokens:
        yield f"${seen.setdefault(token, len(seen))}" if token[0] == "$" else token


def _numberless(token: str) -> str:
    return "#" if token[0] == "#" else token


def _plain(token: str) -> str:
    """A number by its value alone: `2.0` is `2`, whether it is a size or not."""
    if token[0] != "#":
        return token
    number = token.rstrip(MARKS)
    return number.removesuffix(".0")


def _without_sizes(tokens: Sequence[str], marks: str) -> Iterator[str]:
    """The tokens with sizes and what has one of `marks` blanked, `kernel_size=(#, #)` as
    `kernel_size=#`."""
    left = [_unsized(token, marks) for token in tokens]
    while left:
        yield (token := left.pop(0))
        if token[:-1] in ALIKE and left[:1] == ["["]:
            end = left.index("]")
            if {*left[1:end]} == {"#"}:
                left[: end + 1] = ["#"]


def _unsized(token: str, marks: str) -> str:
    """Blank a size. Small whole numbers that their place does not make a size are axes and
    exponents, which make another computation; every other number is a size."""
    number = token[1:].rstrip(MARKS)
    axis = (
        token[-1] not in marks and number.lstrip("-").isdigit() and abs(int(number)) <= LARGEST_AXIS
    )
    return f"#{number}" if axis and token[0] == "#" else _numberless(token)


def _details(tokens: Sequence[str]) -> tuple[str, ...]:
    """Names and values of the arguments that are a number, a switch or a text."""
    plain = ((name, value) for name, value in pairwise(tokens) if name[-1] == "=" != name)
    return tuple(sorted(name + value for name, value in plain if value[0] in "#TF'"))
