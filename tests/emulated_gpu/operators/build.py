"""Compile ``values.cpp`` for the torch that is to load it."""

import subprocess
from pathlib import Path

__all__ = ["build_operators"]

SOURCE = Path(__file__).with_name("values.cpp")
OPTIONS = (
    "-shared -fPIC -O1 -std=c++20 -fvisibility=hidden"
    " -Wall -Werror -Wno-attributes -Wno-interference-size"
)
LIBRARIES = "-lc10", "-ltorch_cpu", "-l:libcuda.so.1"


def build_operators(site: Path, libraries: Path) -> Path:
    """Put the library beside CUDA's in ``libraries``. ``site``: packages, with torch for CUDA."""
    torch, made = site.resolve() / "torch", libraries.resolve() / "libemulated_operators.so"
    command = ["g++", *OPTIONS.split(), SOURCE, "-o", made]
    command += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    command += [f"-L{torch}/lib", f"-L{libraries.resolve()}", f"-Wl,-rpath,{torch}/lib", *LIBRARIES]
    subprocess.run([*map(str, command)], check=True)
    return made
