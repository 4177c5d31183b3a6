"""Identity of snapshots, and the hash of the code that is recorded beside it as advice.

Guarantees: the same stage, configuration, upstreams and version give the same fingerprint in any
process. No hash of code is in a fingerprint: `tasks.versions` says when the version is raised.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel

from kernels_eval.records import stable_hash
from kernels_eval.source.syntax import parse_source

SNAPSHOT_SCHEMA_VERSION = 1


def fingerprint(
    stage: str,
    config: object,
    upstream: Sequence[str] = (),
    version: int | Sequence[int] | str = "",
) -> str:
    """hash(stage name, resolved stage config, upstream fingerprints, version of the stage's logic).

    `version` is one constant of `tasks.versions`, or several. Empty where the configuration is the
    content itself, as for tasks.
    """
    if isinstance(config, BaseModel):
        config = config.model_dump(mode="json")
    version = version if isinstance(version, str | int) else list(version)
    return stable_hash([SNAPSHOT_SCHEMA_VERSION, stage, config, list(upstream), version])


def code_hash(*modules: str) -> str:
    """Hash of the logic of modules or whole packages: comments, formatting and docstrings do not
    change it.

    Raises ModuleNotFoundError for an unknown module.
    """
    return stable_hash([logic_digest(path) for name in modules for path in source_files(name)])


def source_files(module: str) -> list[Path]:
    """The source of a module, or of every module of a package. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(module)
    if spec.submodule_search_locations is None:
        return [Path(str(spec.origin))]
    folders = map(Path, spec.submodule_search_locations)
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def logic_digest(path: Path) -> str:
    """Hash of what one source file does. Cached until the file changes: parsing a whole package
    takes seconds."""
    found = path.stat()
    return _digest(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1024)
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    tree = parse_source(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    docstring.value = ast.Constant(value="")
    return stable_hash([path.name, ast.dump(tree)])
