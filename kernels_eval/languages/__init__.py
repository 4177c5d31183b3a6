"""What kernels are written in: one module per language holds all that is known of it, one object
per name. Others than `BUILT_IN` are entry points in the group `concur.languages`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from kernels_eval.errors import UsageError
from kernels_eval.extensions import extension_names, load_extension
from kernels_eval.installation import install_command, pip_install
from kernels_eval.source.module_text import visible_text

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

BUILT_IN = ("cuda", "triton", "cpp", "cute", "tilelang", "cutile")
"""Modules of this package, each with its `LANGUAGE`, in listing order."""
GROUP = "concur.languages"
Values = tuple[object, ...]
Named = dict[str, object] | None


class Tracer(Protocol):
    """What `Language.watch` is given: it records that a candidate's kernels run."""

    def watch(
        self, name: str, function: Callable[..., object], args: Values, kwargs: Named
    ) -> object:
        """Call a kernel through the tracer, which counts, times or corrupts it."""


class _Registry(type):
    def __iter__(cls) -> Iterator[Language]:
        return iter(registered().values())

    def __getattr__(cls, name: str) -> Language:
        """`Language.CPP` is `Language("cpp")`."""
        if name.isupper() and name.lower() in BUILT_IN:
            return Language(name.lower())
        raise AttributeError(name)


class Language(str, metaclass=_Registry):
    """A language: `Language("cuda")` is the object of that name. Raises ValueError.

    A new one is an instance of a subclass. Defaults suit a language compiled in Python (JIT).
    """

    needs_gpu: ClassVar[bool] = True
    """runs on an NVIDIA GPU, else on the CPU"""
    needs_nvcc: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = {}
    """distributions that it needs beside torch, and their import names"""
    extra: ClassVar[str] = ""
    """the extra of concur that holds them, where there is one"""

    means: ClassVar[str] = ""
    """what a prompt asks for, after "Replace the operators in its forward by"
    """
    example: ClassVar[str] = ""
    """a complete answer to `tasks.synthesis.prompts.EXAMPLE_TASK`"""
    sign: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    """matches Python sources, without comments, that hold a kernel in this language"""
    half_of_others: ClassVar[bool] = False
    """its signs also show in sources of other languages, which are then meant"""

    jit: ClassVar[bool] = True
    """compiled in the candidate's process, which may start programs; else its extensions are built
    before a device is held
    """
    jit_cache: ClassVar[str] = ""
    """environment variable of the compiled kernels' folder, kept for later processes of the same
    source only
    """
    sanitized: ClassVar[bool] = False
    """compute-sanitizer can tell its kernels by the names in a verdict"""
    instrumented: ClassVar[bool] = False
    """its extensions run on the CPU, where GCC's sanitizers find memory errors"""
    compiler_errors: ClassVar[str] = ""
    """expression for its compiler's exceptions, as module.Class: they are compile errors"""
    compiler_frames: ClassVar[str] = ""
    """expression for functions, as module.name, below which every exception is a compile error"""
    launch_errors: ClassVar[str] = ""
    """expression for exceptions of compiled kernels that ask for more than the device has"""

    def __new__(cls, name: str) -> Language:
        if cls is not Language:
            return super().__new__(cls, name)
        if name in BUILT_IN:
            found: Language = import_module(f"{__name__}.{name}").LANGUAGE
            return found
        if isinstance(name, str) and name in registered():
            return registered()[name]
        raise ValueError(f"there is no language {name!r}: languages are {', '.join(registered())}")

    @property
    def value(self) -> str:
        return str(self)

    def watch(self, tracer: Tracer) -> None:
        """Have every launch go through `tracer.watch`; called before the candidate's import.
        Extensions need none.
        """

    def relocate(self, folder: Path, former: str) -> None:
        """Correct the path `former` in the compiled kernels that now lie in `folder`."""

    def versions(self) -> dict[str, str]:
        found = {}
        for name in self.packages:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = ""
        return found

    def doctor(self) -> str:
        """The installed packages. Raises UsageError with the line that installs what is missing."""
        found = self.versions()
        told = ", ".join(f"{name} {at or 'not installed'}" for name, at in found.items())
        absent = [name for name, at in found.items() if not at]
        if absent:
            fix = install_command(self.extra) if self.extra else pip_install(*absent)
            raise UsageError(told, fix)
        return told or "needs no package"

    def __reduce__(self) -> tuple[object, ...]:
        return Language, (str(self),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            Language,
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: object, handler: object) -> dict[str, object]:
        return {"type": "string", "enum": [str(each) for each in Language], "title": "Language"}


@cache
def registered() -> Mapping[str, Language]:
    """Every language by name. Raises UsageError for one that fails to import or is misnamed."""
    found = {name: Language(name) for name in BUILT_IN}
    for name in extension_names(GROUP):
        if name in found:
            continue
        language = load_extension(GROUP, name, Language)
        if language != name:
            raise UsageError(
                f"the language {language} is registered under the name {name!r}",
                f"give its entry point in the group {GROUP} the language's own name",
            )
        found[name] = language
    return found


def languages_of(source: str) -> tuple[Language, ...]:
    """The languages of a candidate's kernels, by its text: C++ only alone, none for plain
    PyTorch.
    """
    text = visible_text(source)
    found = tuple(language for language in Language if language.sign.search(text))
    return tuple(each for each in found if not each.half_of_others) or found
