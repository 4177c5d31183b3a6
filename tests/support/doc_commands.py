"""What the documentation tells people to type: found in its pages, and understood as far as that
goes without typing it.

Guarantees: every line of every shell fence is a command here or a comment; a `concur` command is
parsed by the command itself as it is installed, values of --set and profiles included. Does not say
that a command does what its page says: tests/flows/test_docs.py runs those that it can.
"""

import importlib.util
import re
import shlex
import tempfile
from pathlib import Path
from typing import NamedTuple

import typer

import flows
from flows.cli.main import main

ROOT = Path(flows.__file__).parent.parent
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")
        if (ROOT / name).is_file()
    ),
    *sorted(ROOT.glob("docs/**/*.md")),
]
FENCE = re.compile(r"^(`{3,})(\w*)([^\n]*)\n(.*?)^\1", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "shell", "console")
UsageError = typer.BadParameter.__base__
"""What a command raises for words that it does not understand."""
PLACEHOLDER = re.compile(r"\.\.\.|[A-Z]{3,}")


class Fence(NamedTuple):
    page: Path
    line: int
    language: str
    title: str  # the file that the reader is told to write
    text: str

    @property
    def place(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    place: str
    text: str  # as it stands in the page, continued lines joined, without a comment behind it
    words: list[str]  # of the program: without variables before it, redirections and `&`


def fences():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            title = re.search(r'title="([^"]+)"', match[3])
            yield Fence(
                page,
                text.count("\n", 0, match.start()) + 1,
                match[2],
                title[1] if title else "",
                match[4],
            )


def commands():
    for fence in fences():
        if fence.language not in SHELLS:
            continue
        for line in re.sub(r"\s*\\\n\s*", " ", fence.text).splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            yield Command(fence.place, _without_comment(line), _of_the_program(words))


def _without_comment(line):
    """Up to the first # that starts a word outside of quotes."""
    return re.match(r"""(?:[^'"#]|(?<=\S)#|'[^']*'|"[^"]*")*""", line).group(0).strip()


def _of_the_program(words):
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    for i, word in enumerate(words):
        if word in ("&", "&&", ">", "|", ";"):
            return words[:i]
    return words


def check(command):
    """What is understood of a command: "concur", "make", "module", "pytest", "python", or "other"
    where nothing is.

    Raises AssertionError for an option, target, module, marker or file that is not there.
    """
    words = command.words
    if not words:
        return "other"
    program = words[0].rsplit("/", 1)[-1]
    if words[0].startswith("--"):  # a line that shows options of `concur run`
        parse_concur(["run", *words])
        return "concur"
    if program == "concur":
        parse_concur(words[1:])
        return "concur"
    if program == "make":
        targets = re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert set(words[1:]) <= set(targets), f"{command.place}: no target {words[1:]}"
        return "make"
    if program.startswith("python") and words[1:2] == ["-c"]:
        compile(words[2], command.place, "exec")
        return "python"
    if program.startswith("python") and words[1:3] == ["-m", "pytest"]:
        _check_pytest(command)
        return "pytest"
    if (
        program.startswith("python")
        and words[1:2] == ["-m"]
        and words[2].split(".")[0] in ("benchmarks", "kernels_eval", "flows", "tasks")
    ):
        _check_module(command)
        return "module"
    return "other"


def _check_pytest(command):
    declared = re.findall(
        r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    words = command.words[3:]
    for i, word in enumerate(words):
        if word == "-m":
            assert words[i + 1] in declared, f"{command.place}: no marker {words[i + 1]}"
        elif "/" in word:
            assert (ROOT / word).exists(), f"{command.place}: no file {word}"


def _check_module(command):
    """The options of a module's command are read from its source: asking each for --help would
    import torch again and again."""
    found = importlib.util.find_spec(command.words[2])
    assert found and found.origin, f"{command.place}: no module {command.words[2]}"
    source = Path(found.origin).read_text(encoding="utf-8")
    for option in (word.partition("=")[0] for word in command.words[3:] if word.startswith("--")):
        assert f'"{option}"' in source, f"{command.place}: {command.words[2]} has no {option}"


def parse_concur(words):
    """The context of the command that these words call, parsed but not called. Raises
    UsageError or AssertionError."""
    context = main.make_context(
        "concur", list(words), resilient_parsing="--help" in words or "--version" in words
    )
    group = main
    rest = (
        [*context._protected_args, *context.args]
        if hasattr(context, "_protected_args")
        else list(context.args)
    )
    while isinstance(group, typer.core.TyperGroup) and rest:
        name, group, rest = group.resolve_command(context, rest)
        context = group.make_context(
            name, list(rest), parent=context, resilient_parsing="--help" in rest
        )
        rest = list(context.args) if isinstance(group, typer.core.TyperGroup) else []
    _check_settings(context)
    return context


def _check_settings(context):
    """Profiles and overrides are read as the command would read them; profiles that a page defines
    are checked where it does."""
    from flows.config import load_profile
    from kernels_eval.settings import load_protocol

    profile, overrides = context.params.get("profile"), context.params.get("overrides") or ()
    if context.info_name == "verify-batch":
        load_protocol(overrides)
    elif profile is not None and not PLACEHOLDER.search(profile):
        with tempfile.TemporaryDirectory() as folder:
            load_profile(_written(profile, Path(folder)) or profile, overrides)


def _written(profile, folder):
    """The file of a profile that a page tells the reader to write under this name; None where no
    page does."""
    text = next(
        (fence.text for fence in fences() if fence.language == "yaml" and fence.title == profile),
        None,
    )
    if text is None:
        return None
    (folder / "profile.yaml").write_text(text, encoding="utf-8")
    return str(folder / "profile.yaml")
