"""Keep the hashes of the code behind each version constant, and say when they change.

    python -m tests.support.protocol_lock                        what has changed since the lock
    python -m tests.support.protocol_lock --unchanged "reason"   confirm that no result changes
    python -m tests.support.protocol_lock --raised               lock again after raising constants

Docstrings, comments and formatting do not count, and neither does moving a file. Headers that
candidates are compiled with, and TOML files beside the code, count byte by byte. The reasons given
stay in the lock file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kernels_eval.versions
import tasks.versions
from tasks.files import atomic_write
from tasks.store.identity import logic_digest, source_files
from tasks.versions import LOGIC

ROOT = Path(tasks.versions.__file__).parents[1]
LOCK = Path(__file__).with_suffix(".json")
HEADERS = {"PROTOCOL_VERSION": ROOT / "kernels_eval/compile/headers"}
INSTRUCTION = """\
Code behind a version constant has changed:
{changes}
If the same inputs may now give other results, raise the constant (kernels_eval/versions.py or
tasks/versions.py) and run:  python -m tests.support.protocol_lock --raised
If not, confirm it:  python -m tests.support.protocol_lock --unchanged "why no result changes"
"""


@dataclass(frozen=True)
class Change:
    """One constant whose code differs from the lock."""

    constant: str
    files: tuple[str, ...]
    raised: bool

    def __str__(self) -> str:
        state = "raised" if self.raised else "not raised"
        return f"  {self.constant} ({state}): {', '.join(self.files) or 'only its value'}"


def current() -> dict[str, dict[str, Any]]:
    """Version and hashes of today's code, by constant."""
    return {name: {"version": version_of(name), "files": hashes_of(name)} for name in sorted(LOGIC)}


def version_of(constant: str) -> int:
    home = kernels_eval.versions if constant == "PROTOCOL_VERSION" else tasks.versions
    return int(getattr(home, constant))


def hashes_of(constant: str) -> dict[str, str]:
    """Hash by path from the root of the repository."""
    sources = {path for module in LOGIC[constant] for path in source_files(module)}
    found = {path: logic_digest(path) for path in sources}
    packages = {path.parent for path in sources if path.name == "__init__.py"}
    data = {path.with_suffix(".toml") for path in sources}
    data |= {path for package in packages for path in package.glob("*.toml")}
    found |= {path: _bytes_digest(path) for path in data if path.is_file()}
    headers = HEADERS[constant].rglob("*") if constant in HEADERS else ()
    found |= {path: _bytes_digest(path) for path in headers if path.is_file()}
    return {str(path.relative_to(ROOT)): digest[:12] for path, digest in sorted(found.items())}


def _bytes_digest(path: Path) -> str:
    return hashlib.sha256(path.name.encode() + path.read_bytes()).hexdigest()


def changes(locked: dict[str, Any], now: dict[str, dict[str, Any]]) -> list[Change]:
    """What differs, a file that was only moved left out."""
    found = []
    for constant, state in now.items():
        before = locked.get(constant, {"version": None, "files": {}})
        files = [path for path, digest in state["files"].items() if not _known(digest, before)]
        files += [path for path, digest in before["files"].items() if not _known(digest, state)]
        raised = state["version"] != before["version"]
        if files or raised:
            found.append(Change(constant, tuple(sorted(set(files))), raised))
    return found


def _known(digest: str, state: dict[str, Any]) -> bool:
    return digest in state["files"].values()


def read_lock(path: Path = LOCK) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def main(arguments: list[str] | None = None, path: Path = LOCK) -> int:
    """Exit status 1 where something has changed that is neither confirmed nor raised."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--unchanged", metavar="REASON", help="why no result changes")
    parser.add_argument("--raised", action="store_true", help="lock the raised constants again")
    options = parser.parse_args(arguments)
    locked, now = read_lock(path), current()
    found = changes(locked, now)
    pending = [change for change in found if not (options.raised and change.raised)]
    if pending and not options.unchanged:
        sys.stderr.write(INSTRUCTION.format(changes="\n".join(map(str, pending))))
        return 1
    if options.unchanged or options.raised:
        confirmed = locked.get("confirmed", [])
        if options.unchanged:
            names = sorted({change.constant for change in pending})
            today = datetime.now(UTC).date().isoformat()
            confirmed.append({"date": today, "constants": names, "reason": options.unchanged})
        atomic_write(path, json.dumps(now | {"confirmed": confirmed}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
