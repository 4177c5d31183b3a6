"""`make audit`: are the dependencies what constraints.txt says, all of them, and is anything known
against them?

Guarantees: every distribution that `concur[train,dev,...]` needs here, directly or through others,
is pinned, and is installed in the pinned version; `pip check` agrees; where pip-audit is installed
and advisories can be had, any that concerns a pin is a failure. Where they cannot be had it says so
in its last line: then nobody has looked for known vulnerabilities. Holds no list of bad versions of
its own. Does not check hashes: torch's builds differ by platform, and the pins are for all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = ("train", "dev", "browser", "docs", "server")
TIMEOUT_S = 900


def pins(text: str) -> dict[str, str]:
    """name -> version of a file of constraints. Raises ValueError for a line that pins nothing."""
    found = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            name, equal, version = line.partition("==")
            if not equal:
                raise ValueError(f"this line pins no version: {line}")
            found[canonicalize_name(name.strip())] = version.partition(";")[0].strip()
    return found


def needed(project: str, extras: Iterable[str]) -> dict[str, str | None]:
    """What a project needs in this environment, directly and through others: name -> installed
    version, None where it is not installed."""
    found: dict[str, str | None] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(project), extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            found[name] = None
            continue
        found[name] = installed.version
        for text in installed.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [
                    (canonicalize_name(requirement.name), more)
                    for more in ("", *requirement.extras)
                ]
    del found[canonicalize_name(project)]
    return found


def differences(pinned: Mapping[str, str], installed: Mapping[str, str | None]) -> list[str]:
    """One line for each distribution that is needed and not pinned, not installed, or installed in
    another version. A local label such as `+cpu` is the platform's build of the same version."""
    lines = []
    for name, version in sorted(installed.items()):
        if version is None:
            lines.append(f"{name} is needed and not installed")
        elif name not in pinned:
            lines.append(f"{name} {version} is needed and not pinned")
        elif version.partition("+")[0] != pinned[name].partition("+")[0]:
            lines.append(f"{name} is {version}, pinned is {pinned[name]}")
    return lines


def advisories(report: str) -> tuple[list[str], int, int]:
    """Of pip-audit's JSON: a line for each vulnerability, how many distributions were looked up,
    and how many could not be."""
    entries = json.loads(report)["dependencies"]
    skipped = sum("skip_reason" in entry for entry in entries)
    lines = [
        f"{each['name']} {each['version']}: {one['id']}"
        for each in entries
        for one in each.get("vulns", [])
    ]
    return lines, len(entries) - skipped, skipped


def known_vulnerabilities() -> tuple[list[str], str]:
    """What pip-audit finds, and a sentence on what it could look at."""
    if not find_spec("pip_audit"):
        return (
            [],
            (
                "pip-audit is not installed: known vulnerabilities were NOT looked for (pip install"
                " pip-audit)"
            ),
        )
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "-r",
        str(CONSTRAINTS),
        "--no-deps",
        "--disable-pip",
        "--format",
        "json",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        lines, looked_up, skipped = advisories(done.stdout)
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return [], "no advisories could be had here: known vulnerabilities were NOT looked for"
    if not looked_up:
        return [], "the index here has no advisories: known vulnerabilities were NOT looked for"
    return lines, f"pip-audit looked {looked_up} pins up, and could not look up {skipped}"


def main() -> int:
    problems = differences(pins(CONSTRAINTS.read_text(encoding="utf-8")), needed("concur", EXTRAS))
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    problems += checked.stdout.splitlines() if checked.returncode else []
    found, said = known_vulnerabilities()
    for line in [*problems, *found]:
        print(line)
    print(
        f"{len(problems)} differences from constraints.txt; {len(found)} known vulnerabilities."
        f" {said}."
    )
    unseen = "NOT" in said and os.environ.get("CONCUR_REQUIRE_ADVISORIES") == "1"
    return 1 if problems or found or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
