"""vLLM, SGLang and Triton for a machine with PyTorch 2.11 for CUDA 13 and no network, in pieces.

    python benchmarks/check_gpu/kit.py                  # for the Python that runs it
    python benchmarks/check_gpu/kit.py --python 3.12    # for another

It takes wheels from the package index, leaves out what a GPU of compute capability 9.0 and the
checks here do not need, and packs them into `kit.tar.xz.1of3`, ... of at most --piece MiB each, so
that they can be carried one at a time. `python benchmarks/check_gpu --kit FOLDER` unpacks them.
Needs pip, strip and xz; 6 GB of disk.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from zipfile import ZipFile

from carried import ARCHIVE
from fat_binary import keep_architecture

ARCHITECTURE = 90
PACKAGES = "vllm==0.33.0", "triton==3.8.0", "sglang==0.5.23", "sglang-kernel==0.4.10"
KERNELS_FOR_TORCH_2_11 = "sglang-kernel==0.4.6"  # later ones are bound to a later torch
GLIBC = 39, 35, 34, 31, 28, 27, 24, 17, 12, 5  # pip matches each version by itself
LEFT_OUT = {
    "vllm": (
        *("vllm/vllm-rs", "vllm/_qutlass_C*", "vllm/_flashmla*", "vllm/_flashkda*"),
        *(
            "vllm/_deepselect*",
            "vllm/vllm_flash_attn/_vllm_fa2_C*",
            "vllm/third_party/fmha_sm100/*",
        ),
    ),
    "triton": (
        *("*/cupti*", "*libproton.so", "triton/instrumentation/*", "*/nvidia/bin/*"),
        *("triton/plugins/*", "triton/FileCheck"),
    ),
    "sglang": ("sglang/multimodal_gen/*", "sglang/test/*", "sglang/srt/rust_extensions/_bench*"),
    "sglang_kernel": ("*.so", "triton_kernels/*"),
}
WITH_OTHER_GPUS = (
    *("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"),
    "sgl_kernel/sm90/common_ops.abi3.so",
)
WITH_SYMBOLS = "vllm/*.so", "vllm/vllm_flash_attn/*.so", "triton/_C/libtriton.so"


def main() -> None:
    """Build the pieces and say what is in them."""
    options = parse_options()
    began = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        site = Path(work, "site")
        fill(site, Path(work, "wheels"), options.python)
        pieces = pack(site, options.folder, options.piece << 20)
        print("\n".join(sorted(path.stem for path in site.glob("*.dist-info"))))
    for piece in pieces:
        print(f"{piece}  {piece.stat().st_size / 2**20:.1f} MiB")
    print(f"built for Python {options.python} in {time.monotonic() - began:.0f} s")


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    own = "{}.{}".format(*sys.version_info)
    parser.add_argument("--python", default=own, help="version of Python where it is used")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu_kit"))
    parser.add_argument("--piece", type=int, default=45, metavar="MIB", help="size of a piece")
    return parser.parse_args()


def fill(site: Path, wheels: Path, python: str) -> None:
    """Everything that is carried, in one folder to be put on the path."""
    wheels.mkdir()
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    target += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    target += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", "--no-deps"]
    requirements = str(Path(__file__).with_name("kit.txt"))
    pip("install", "--no-compile", f"--target={site}", f"--requirement={requirements}", *target)
    pip("download", f"--dest={wheels}", *PACKAGES, *target)
    pip("download", f"--dest={wheels / 'old'}", KERNELS_FOR_TORCH_2_11, *target)
    for wheel in wheels.glob("*.whl"):
        unzip(wheel, site, leaving_out=LEFT_OUT[wheel.name.split("-")[0]])
    (old,) = (wheels / "old").iterdir()
    unzip(old, site, only="sgl_kernel/sm90/*")
    for name in WITH_OTHER_GPUS:
        keep_architecture(site / name, ARCHITECTURE)
    libraries = [path for pattern in WITH_SYMBOLS for path in site.glob(pattern)]
    subprocess.run(["strip", "--strip-all", *libraries], check=True)


def pip(command: str, *arguments: str) -> None:
    """pip of the Python that runs this."""
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", *arguments], check=True)


def unzip(wheel: Path, folder: Path, only: str = "*", leaving_out: Iterable[str] = ()) -> None:
    """Files of a wheel by their names."""
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if fnmatch(name, only) and not any(fnmatch(name, each) for each in leaving_out):
                archive.extract(name, folder)


def pack(site: Path, folder: Path, most_bytes: int) -> list[Path]:
    """Pieces of one compressed archive."""
    for old in folder.glob(f"{ARCHIVE}*"):
        old.unlink()
    whole = folder / ARCHIVE
    command = ["tar", "--create", "--use-compress-program=xz -6 --threads=2", f"--file={whole}"]
    subprocess.run([*command, f"--directory={site}", "."], check=True)
    number = -(-whole.stat().st_size // most_bytes)
    pieces = [folder / f"{ARCHIVE}.{n}of{number}" for n in range(1, number + 1)]
    with whole.open("rb") as source:
        for piece in pieces:
            piece.write_bytes(source.read(most_bytes))
    whole.unlink()
    return pieces


if __name__ == "__main__":
    main()
