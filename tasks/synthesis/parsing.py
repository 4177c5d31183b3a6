"""Parsing of a response into reasoning and code.

Guarantees: never raises; linear time; either `code` that defines ModelNew or one `parse_reason`;
the same parts whoever separated the reasoning.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from kernels_eval.records import Json, Reason, Record
from kernels_eval.source.syntax import UNPARSABLE, parse_source
from tasks.thoughts import THINK_CLOSE, THINK_OPEN, plain_marks

# A fence at the start of a line with whatever follows it, or one that a model wrote at the end of a
# line of prose ("...:```python").
_FENCE = re.compile(
    r"^[ \t]*(?P<run>`{3,}|~{3,})(?P<rest>[^\n]*)$|(?<![`\n])(?P<late>```)(?P<tag>python3?|py)["
    r" \t]*$",
    re.MULTILINE,
)
_TAG = re.compile(r"[A-Za-z][\w+#.-]*(?::\S*)?|\{[^}]*\}")
_LANGUAGE = re.compile(r"\{[ .]*([^\s.}]+)|([^\s:]+)(?=:\S|\s|\Z)|(\S+)")
_OPEN = re.compile(r"^[ \t]*<think>", re.MULTILINE)
_ANSWER = re.compile(r"^[ \t]*<answer>", re.MULTILINE)
# what stands around an answer: tags, GLM's box
_AROUND = r"</?(?:answer|response)>|<\|(?:begin|end)_of_box\|>"
_ANSWER_TAG = re.compile(rf"^[ \t]*(?:{_AROUND})[ \t]*|(?:{_AROUND})\s*\Z", re.MULTILINE)
# a fence in a quotation, with the quoted lines behind it
_QUOTED = re.compile(r"^[ \t]*>[ \t]?(?:`{3,}|~{3,}).*(?:\n[ \t]*>.*)*", re.MULTILINE)
_QUOTE = re.compile(r"^([ \t]*)>", re.MULTILINE)
# a closing fence behind the last line of code
_LATE = re.compile(r"(?<=[^\s`])```[ \t]*$", re.MULTILINE)
_CLASS = re.compile(r"^[ \t]*class[ \t]+ModelNew\b", re.MULTILINE)
_MODULE = re.compile(
    r"^[ \t]*(?:class[ \t]+ModelNew\b|ModelNew[ \t]*(?::[^=\n]+)?=[ \t]*\w+[ \t]*(?:#.*)?$)",
    re.MULTILINE,
)
_WORD = re.compile(r"\w")  # an answer without one (nothing, or a stray closing fence) is none
_SURROGATES = re.compile("[\ud800-\udfff]")
_PYTHON_TAGS = frozenset({"", "python", "python3", "py"})
_OTHER_TAGS = frozenset(
    "c c++ cpp cu cuda triton markdown md bash sh shell text txt json diff".split()
)
# these open a block even where one is open already
_OPENING_TAGS = _PYTHON_TAGS - {""} | _OTHER_TAGS
# longer code is searched as text: ast takes about 400 bytes of memory a character
_AST_LIMIT = 500_000
# a fence in a fence (a Markdown answer, a docstring's example); bounds the text that blocks share
_DEEPEST = 2


class Parsed(Record):
    """A parsed response: exactly one of `code` and `parse_reason` (a reason of Status.NO_CODE) is
    None."""

    reasoning: str
    answer: str
    code: str | None = None
    parse_reason: Reason | None = None


def parse_response(
    text: str, *, reasoning: str | None = None, finish_reason: str | None = None
) -> Parsed:
    """Parse a response. `reasoning` is what the server separated, if it did (a table may repeat it
    in the text); `finish_reason` its own, "length" if cut off.

    The reasoning is the server's, or the text before the last mark that closes a thought, such as
    `</think>` (tasks/thoughts.toml). With neither, it ends where the last module begins; without a
    module, a text is all reasoning if cut off, else all answer. The code is the last complete
    fenced block that defines ModelNew. One in the reasoning counts only where the model stopped by
    itself without an answer, or the module ends the reasoning (a late tag).
    """
    parts = _split(clean_text(text))
    thought = _untagged(plain_marks(clean_text(reasoning or "")))
    if thought and (parts.answer is None or thought not in parts.thought):
        parts = _Parts(thought, _ANSWER_TAG.sub("", clean_text(text)))
    thought, answer = parts.thought, parts.answer
    if answer is None or not _WORD.search(answer):
        return _without_answer(parts, finish_reason)
    found = _find_code(answer, finish_reason if parts.again is None else "length")
    if found.reason == Reason.NO_CODE_BLOCK:
        # reasoning that ends with its module, and an answer that only speaks of it: QwQ-32B writes
        # one in eighteen responses so
        moved = _find_code(thought, None)
        if moved.code is not None and not _WORD.search(thought[moved.end :]):
            return _moved(thought, moved, f"\n\n{answer.strip()}")
    return Parsed(
        reasoning=_joined(thought, parts.again),
        answer=answer.strip(),
        code=found.code,
        parse_reason=found.reason,
    )


def _joined(thought: str, again: str | None) -> str:
    return "\n\n".join(each for each in (thought, again) if each)


def _moved(thought: str, found: _Found, answer: str = "", before: str = "") -> Parsed:
    return Parsed(
        reasoning=_joined(before, thought[: found.start].strip()),
        answer=thought[found.start :].strip() + answer,
        code=found.code,
    )


def _without_answer(parts: _Parts, finish_reason: str | None) -> Parsed:
    thought, closed = parts.thought, parts.answer is not None
    if parts.again is not None:
        found = _find_code(parts.again, finish_reason)
        if found.code is not None and finish_reason != "length":
            return _moved(parts.again, found, before=thought)
        whole = _joined(thought, parts.again)
        return Parsed(reasoning=whole, answer="", parse_reason=Reason.TRUNCATED)
    found = _find_code(thought, finish_reason)
    draft = (closed and finish_reason == "length") or (parts.opened and finish_reason != "stop")
    if found.code is not None and not draft:
        return _moved(thought, found)
    if closed or parts.opened:
        cut_off = parts.opened or finish_reason == "length"
        reason = Reason.TRUNCATED if cut_off else Reason.NO_CODE_BLOCK
        return Parsed(reasoning=thought, answer="", parse_reason=reason)
    cut_off = found.reason == Reason.TRUNCATED
    reasoning, answer = (thought, "") if cut_off else ("", thought)
    return Parsed(reasoning=reasoning, answer=answer, parse_reason=found.reason)


def is_unfinished(text: str) -> bool:
    """Whether a recorded response breaks off, in place of a finish reason: an unclosed think block
    or last fence, or prose after the last block that ends with a letter, digit or comma."""
    parts = _split(clean_text(text))
    if parts.opened:
        return True
    rest = parts.again or (parts.thought if parts.answer is None else parts.answer)
    scan = _scan(rest)
    if scan.unclosed or not scan.blocks:
        return scan.unclosed
    _, _, prose = rest[scan.blocks[-1].end :].partition("\n")
    end = prose.rstrip()[-1:]
    return end == "," or end.isalnum()


def answer_of(response: str) -> str:
    """A response without its thoughts; all of it where none is marked."""
    parts = _split(clean_text(response))
    return parts.thought if parts.answer is None else parts.answer


def guessed_finish(text: str) -> Json:
    return {"finish_reason": "length" if is_unfinished(text) else "stop", "finish_guessed": True}


def clean_text(text: str) -> str:
    """The text with Unix line ends, and lone surrogates (invalid in UTF-8) as U+FFFD."""
    return _SURROGATES.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


class _Parts(NamedTuple):
    thought: str
    answer: str | None
    """None where no mark says that it begins"""
    opened: bool = False
    """whether no thought was closed, and one opened"""
    again: str | None = None
    """a thought behind the answer that was opened and not closed"""


def _split(text: str) -> _Parts:
    text = plain_marks(text)
    thought, tag, answer = text.rpartition(THINK_CLOSE)
    if not tag:
        *_, tagged = [None, *_ANSWER.finditer(text)]
        if tagged is None:
            opened = THINK_OPEN in text
            return _Parts(_untagged(text) if opened else text.strip(), None, opened)
        thought, answer = text[: tagged.start()], text[tagged.end() :]
    again = None
    if reopened := _OPEN.search(answer):
        answer, again = answer[: reopened.start()], _untagged(answer[reopened.start() :])
    return _Parts(_untagged(thought), _ANSWER_TAG.sub("", answer), again=again)


def _untagged(thought: str) -> str:
    opened = _OPEN.search(thought)
    if opened and THINK_CLOSE not in thought[: opened.start()]:
        thought = thought[opened.end() :]
    return thought.replace(THINK_OPEN, "").replace(THINK_CLOSE, "").strip()


class _Found(NamedTuple):
    code: str | None
    reason: Reason | None
    start: int = 0
    end: int = 0


def _find_code(text: str, finish_reason: str | None) -> _Found:
    scan = _scan(text)
    if code := _last_module(text, scan):
        return code
    if _QUOTED.search(text):
        plain = _QUOTED.sub(lambda found: _QUOTE.sub(r"\1 ", found[0]), text)  # of the same length
        if code := _last_module(plain, _scan(plain)):
            return code
    if scan.unclosed and (late := _LATE.search(text, scan.open[-1].start)):
        shut = f"{text[: late.start()]}\n{text[late.start() :]}"
        if code := _last_module(shut, _scan(shut), strict=True):
            return code
    if scan.unclosed or finish_reason == "length":
        return _Found(None, Reason.TRUNCATED)
    if any(text[block.start : block.end].strip() for block in scan.blocks):
        return _Found(None, Reason.MISSING_MODEL_NEW)
    if _MODULE.search(text) and _defines_model(text.strip(), strict=True):
        return _Found(text.strip() + "\n", None, 0, len(text))
    return _Found(None, Reason.NO_CODE_BLOCK)


def _last_module(text: str, scan: _Scan, strict: bool = False) -> _Found | None:
    for block in reversed(scan.blocks):
        if _MODULE.search(text, block.start, block.end):
            code, doubtful = block.code(text), block.nests or block.tag not in _PYTHON_TAGS
            if _defines_model(code, strict=strict or doubtful):
                return _Found(code, None, block.opening, block.end)
    return None


def _defines_model(code: str, *, strict: bool) -> bool:
    lenient = not strict and _CLASS.search(code) is not None
    if len(code) > _AST_LIMIT:
        return lenient
    try:
        tree = parse_source(code)
    except UNPARSABLE:
        return lenient
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name("ModelNew")], ast.Name(name)) if name in names:
                return True
            case ast.AnnAssign(ast.Name("ModelNew"), value=ast.Name(name)) if name in names:
                return True
    return "ModelNew" in names


@dataclass(slots=True)
class _Block:
    opening: int
    start: int
    char: str
    length: int
    indent: int
    tag: str
    end: int = -1
    nests: bool = False

    def code(self, text: str) -> str:
        content = text[self.start : self.end]
        if self.indent:  # a block in a list item: its lines carry the fence's own indentation
            content = re.sub(rf"^[ \t]{{1,{self.indent}}}", "", content, flags=re.MULTILINE)
        return content.strip("\n") + "\n"


@dataclass
class _Scan:
    blocks: list[_Block] = field(default_factory=list)
    open: list[_Block] = field(default_factory=list)

    @property
    def unclosed(self) -> bool:
        return bool(self.open) and (not self.blocks or self.open[-1].start > self.blocks[-1].end)


def _scan(text: str) -> _Scan:
    scan = _Scan()
    for match in _FENCE.finditer(text):
        top = scan.open[-1] if scan.open else None
        if match["late"]:
            if top is None:
                start, end = match.start("late"), match.end() + 1
                scan.open.append(_Block(start, end, "`", 3, 0, match["tag"]))
            continue
        run, rest = match["run"], match["rest"].strip()
        if "```" in rest:
            continue  # inline code that happens to begin a line
        indent = match.start("run") - match.start()
        language = _LANGUAGE.match(rest)
        word = language[language.lastindex or 0].lower() if language else ""
        if word in _OPENING_TAGS or (top is None and (not rest or _TAG.fullmatch(rest))):
            _push(scan, _Block(match.start(), match.end() + 1, run[0], len(run), indent, word))
        elif top and run.startswith(top.char * top.length) and indent <= top.indent + 3:
            top.end = match.start()
            scan.blocks.append(scan.open.pop())
    return scan


def _push(scan: _Scan, block: _Block) -> None:
    if len(scan.open) == _DEEPEST:
        scan.open.pop()
    if scan.open:
        scan.open[-1].nests = True
    scan.open.append(block)
