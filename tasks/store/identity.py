"""Identity of snapshots, and the advisory hash of the code recorded beside it. Code is in no
fingerprint: `tasks.versions` says when to raise the version."""

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

    `version` is one constant of `tasks.versions` or several; empty where the configuration is the
    content itself.
    """
    if isinstance(config, BaseModel):
        config = config.model_dump(mode="json")
    version = version if isinstance(version, str | int) else list(version)
    return stable_hash([SNAPSHOT_SCHEMA_VERSION, stage, config, list(upstream), version])


def code_hash(*modules: str) -> str:
    """Hash of the logic of modules or packages, without comments, formatting and docstrings.

    Raises ModuleNotFoundError.
    """
    return stable_hash([logic_digest(path) for name in modules for path in source_files(name)])


def source_files(module: str) -> list[Path]:
    """Sources of a module or of all modules of a package. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(module)
    if spec.submodule_search_locations is None:
        return [Path(str(spec.origin))]
    folders = map(Path, spec.submodule_search_locations)
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def logic_digest(path: Path) -> str:
    """Hash of a source file's logic, cached until the file changes: parsing a package takes
    seconds."""
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
