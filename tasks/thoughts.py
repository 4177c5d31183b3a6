"""How model families mark their thoughts: one table for what reads answers and for what trains."""

from __future__ import annotations

import re
from typing import NamedTuple

from kernels_eval.tables import table_beside

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Form(NamedTuple):
    """Marks of a family. `opening` and `closing` are empty where nobody writes so on purpose."""

    opening: str
    closing: str
    opens: re.Pattern[str]
    closes: re.Pattern[str]
    begins: re.Pattern[str]
    """`opens` at the start of a line, or behind the end of an answer"""
    ends: re.Pattern[str]


def _form(opens: str, closes: str, ends: str = r"\Z", opening: str = "", closing: str = "") -> Form:
    begins = rf"(?:^[ \t]*|(?:{ends})\s*)(?:{opens})"
    patterns = (opens, closes, begins, rf"(?:{ends})\s*\Z")
    return Form(opening, closing, *(re.compile(each, re.MULTILINE) for each in patterns))


_TOLD = table_beside(__file__)
FORMS = [_form(**row) for row in _TOLD["form"]]
ENDS = re.compile(rf"(?:\s*(?:{'|'.join(_TOLD['ends'])}))+\s*\Z")
LAST = 200
"""Characters in which a turn's last tokens are looked for."""
PLAIN = FORMS[0]


def plain_marks(text: str) -> str:
    """The text with its thoughts between `<think>` and `</think>`, whatever its model wrote, and
    without the tokens that end it."""
    text = text[:-LAST] + ENDS.sub("", text[-LAST:])
    form = _form_of(text)
    if form is None or form is PLAIN:
        return text
    closings = list(form.closes.finditer(text))
    end = closings[-1].start() if closings else len(text)
    head, *thoughts = form.opens.split(form.closes.sub("\n", text[:end]))
    if thoughts:
        head += f"\n{THINK_OPEN}\n" + "\n\n".join(each.strip() for each in thoughts)
    if not closings:
        return head
    answer = form.ends.sub("", text[closings[-1].end() :])
    return f"{head}\n{THINK_CLOSE}\n" + form.begins.sub(f"\n{THINK_OPEN}\n", answer)


def _form_of(text: str) -> Form | None:
    """The form that the text begins with, else that of the first mark that closes a thought, else
    of the first that opens one."""
    start = text.lstrip()
    for form in FORMS:
        if form.opens.match(start):
            return form
    for marks in ([form.closes for form in FORMS], [form.begins for form in FORMS]):
        found = [
            (each.start(), place) for place, mark in enumerate(marks) if (each := mark.search(text))
        ]
        if found:
            return FORMS[min(found)[1]]
    return None


def opened_by(prompt: str) -> Form | None:
    """The form whose thought a generation prompt opens at its end."""
    return _ending(prompt, [(form, form.opening) for form in FORMS])


def closed_by(prompt: str) -> Form | None:
    """The form whose thought a generation prompt closes at its end: its model is not to think."""
    return _ending(prompt, [(form, form.closing) for form in FORMS])


def _ending(prompt: str, marks: list[tuple[Form, str]]) -> Form | None:
    end = prompt.rstrip()
    return next((form for form, mark in marks if mark and end.endswith(mark.strip())), None)


def named_in(template: str) -> Form | None:
    """The form whose marks a chat template writes."""
    return next((form for form in FORMS if form.opening and form.opening.strip() in template), None)
