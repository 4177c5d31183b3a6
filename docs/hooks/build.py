"""Build the documentation site with Zensical: `python docs/hooks/build.py [SITE]`.

Guarantees: the pages of docs/, the reference from the code, and every file of the repository that a
page links to, in one site; a broken link, anchor or reference is an error and exit status 1.
Zensical runs no hooks, so the pages are written to a temporary folder first. Does not write into
docs/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import reference
import repository
import yaml

ROOT = Path(__file__).resolve().parents[2]


def main(site: Path) -> int:
    """Write the site; the exit status."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    own = {
        str(file.relative_to(ROOT / "docs")): file.read_text(encoding="utf-8")
        for file in sorted(ROOT.glob("docs/**/*.md"))
    } | reference.pages()
    with tempfile.TemporaryDirectory(prefix="concur-docs-") as folder:
        place = Path(folder)
        repository.write_pages(own, place / "pages")
        shutil.copytree(ROOT / "docs/assets", place / "pages/assets")
        config |= {"docs_dir": "pages", "site_dir": "site"}
        config["plugins"][-1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
        (place / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
        words = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "mkdocs.yml"]
        done = subprocess.run(words, cwd=place, env={**os.environ, "NO_COLOR": "1"}, check=False)
        if done.returncode == 0:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(place / "site", site)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if sys.argv[1:] else ROOT / "build/docs").resolve()))
