"""Every command on the page about cleaning up is one that `concur` knows, with options that it
takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flows.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "clean-up.md"
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    for line in block.splitlines()
    if line.strip()
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_parses(command: list[str]) -> None:
    assert command[0] == ".venv/bin/concur"
    found = main.get_command(None, command[1])
    assert found is not None, command
    found.make_context(command[1], command[2:])


def test_every_option_of_gc_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    gc = main.get_command(None, "gc")
    assert gc is not None
    options = {name for option in gc.params for name in option.opts} - {"--root"}
    assert sorted(name for name in options if name not in text) == []
