"""What the set-up scripts share: a virtual environment with torch for CPU in it.

Standard library only, because it runs before anything is installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """One virtual environment; every method ends the set-up with a message when it fails."""

    path: Path
    recipe: Path  # the set-up script, which is part of what decides whether it is up to date

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def is_complete(self) -> bool:
        """Whether a set-up with the same recipe has ended well."""
        return self._mark.exists() and self._mark.read_text() == self._fingerprint()

    def mark_complete(self) -> None:
        """Remember that nothing is left to do."""
        self._mark.write_text(self._fingerprint())

    def create(self) -> None:
        """Make it, with torch for CPU, so that nothing pulls in the CUDA build afterwards."""
        ensure_installed(
            {
                "g++": has_program("g++"),  # torch.compile writes C++, which includes Python.h
                "python3-dev": Path(sysconfig.get_path("include"), "Python.h").exists(),
                "libnuma1": find_library("numa") is not None,  # vLLM's CPU kernels
            }
        )
        ensure_installed(
            {"libtcmalloc-minimal4": find_library("tcmalloc_minimal") is not None},
            consequence="on CPUs prompts will take longer",
        )
        if not self.python.exists():
            print(f"making {self.path}", flush=True)
            venv.create(self.path, with_pip=True)
        if self.runs("import torch"):
            return
        print(f"installing {TORCH} for CPU", flush=True)
        self.pip("install", "--quiet", TORCH)
        if not self.runs("import torch; assert torch.version.cuda is None"):
            sys.exit(
                f"pip found a CUDA build of {TORCH}, not the one for CPU. Point pip at PyTorch's "
                "CPU wheels, for example with the variable PIP_EXTRA_INDEX_URL or in pip.conf "
                "(extra-index-url = the CPU index named on pytorch.org), remove the environment "
                f"({self.path}) and run this again."
            )

    def runs(self, statement: str) -> bool:
        """Whether ``statement`` runs in the environment."""
        # Plug-ins of torch may be those of an earlier release of this project, and not load.
        variables = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        result = subprocess.run(
            [self.python, "-c", statement], env=variables, capture_output=True, check=False
        )
        return result.returncode == 0

    def add_to_path(self, folder: Path) -> None:
        """Have ``folder`` at the end of the path of every process of the environment."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        found = subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, check=True
        )
        Path(found.stdout.strip(), f"{folder.name}.pth").write_text(f"{folder}\n")

    def pip(self, *arguments: str) -> None:
        """Run pip in the environment; its own message explains a failure."""
        result = subprocess.run([self.python, "-m", "pip", *arguments], check=False)
        if result.returncode:
            sys.exit(f"pip {' '.join(arguments)} failed; its message is above")

    @property
    def _mark(self) -> Path:
        return self.path / "ultraep-setup"

    def _fingerprint(self) -> str:
        files = (Path(__file__), self.recipe, ROOT / "pyproject.toml")
        content = b"".join(file.read_bytes() for file in files)
        return hashlib.sha256(content + str(ROOT).encode()).hexdigest()


def has_program(name: str) -> bool:
    """Whether ``name`` is on the path."""
    return shutil.which(name) is not None


def ensure_installed(packages: Mapping[str, bool], *, consequence: str = "") -> None:
    """Install those of Debian's ``packages`` that are not there yet, where that is possible.

    Where it is not, ends the set-up, or goes on and says what that means (``consequence``).
    """
    missing = [name for name, is_there in packages.items() if not is_there]
    if not missing:
        return
    names = " ".join(missing)
    if os.geteuid() == 0 and has_program("apt-get"):
        print(f"installing {names}", flush=True)
        quietly = {"check": True, "stdout": subprocess.DEVNULL}
        apt = ["flock", __file__, "apt-get"]  # two set-ups may run at once
        subprocess.run([*apt, "update"], **quietly)
        subprocess.run([*apt, "install", "--yes", "--no-install-recommends", *missing], **quietly)
    elif consequence:
        print(f"{names} missing (Debian: apt-get install {names}): {consequence}", flush=True)
    else:
        sys.exit(f"set-up needs {names}; install them (Debian: apt-get install {names})")
