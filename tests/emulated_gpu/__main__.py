"""`benchmarks/check_gpu` on a machine without a GPU, on the emulated GPU.

    python -m tests.emulated_gpu                        # every part that does not only measure
    python -m tests.emulated_gpu --devices 2 --parts server-vllm

It makes what is missing in build/: an environment with PyTorch for CUDA (6 GB), the kit of both
engines, and the emulated GPU's libraries (``libraries``). Their memory is the host's. The kernels
of this project are executed (``kernels``). torch's operators and both engines' compute on the CPU
(``operators``, ``references``). It shows libraries, flags, devices, all that the host does, what is
balanced, answers, and waits between streams that are missing (``order``); it shows no numbers of
compiled kernels, no NCCL and no times. Streams of engines do everything at once, unless
``EMULATED_GPU_HOLDS`` is the seed of what they hold back. Needs Linux, an x86-64 processor, Python
3.11 or later, gcc, g++, xz, and for SGLang nvcc of CUDA 13.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path[1:1] = [str(ROOT / "benchmarks" / "check_gpu")]

from carried import missing_piece  # noqa: E402

from tests.emulated_gpu.libraries.build import build  # noqa: E402
from tests.emulated_gpu.operators.build import build_operators  # noqa: E402

MADE = ROOT / "build" / "emulated_gpu"
KIT = ROOT / "build" / "gpu_kit"
PARTS = (
    *("kit", "values", "engine", "server-vllm", "server-sglang"),
    *("experts-vllm", "experts-sglang"),
)


def main() -> None:
    """Make what is missing, and run the parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--devices", type=int, default=1, help="GPUs that the machine seems to have"
    )
    parser.add_argument("--json", type=Path, default=MADE / "found.json", help="the result")
    parser.add_argument("others", nargs="*", help="further arguments of check_gpu, behind --")
    options = parser.parse_args()
    python = machine()
    if missing_piece(KIT):
        subprocess.run([sys.executable, ROOT / "benchmarks" / "check_gpu" / "kit.py"], check=True)
    site = subprocess.run([python, "-c", SITE], check=True, capture_output=True, text=True).stdout
    libraries = build(Path(site.strip()), MADE / "lib")
    operators = build_operators(Path(site.strip()), MADE / "lib")
    command = [python, ROOT / "benchmarks" / "check_gpu", "--kit", KIT, "--json", options.json]
    command += ["--seconds", "1800", "--parts", *options.parts, *options.others]
    found = environment(libraries, operators, options.devices)
    sys.exit(subprocess.run([*map(str, command)], env=found).returncode)


SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def machine() -> Path:
    """Python of an environment like that of a machine with a GPU, with PyTorch and no engine."""
    folder, done = MADE / "machine", MADE / "machine-is-made"
    python = folder / "bin" / "python"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "-r", FOLDER / "machine.txt"]
        subprocess.run(command, check=True)
        done.touch()
    return python


def environment(libraries: list[Path], operators: Path, devices: int) -> dict[str, str]:
    """Of every process that is to see the emulated GPU."""
    folder = str(libraries[0].parent)
    path = [str(ROOT), str(FOLDER / "entry_points"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "LD_LIBRARY_PATH": folder,
        "LIBRARY_PATH": folder,  # SGLang links what nvcc compiles as it starts
        "TRITON_LIBCUDA_PATH": folder,
        "TRITON_CACHE_DIR": str(MADE / "triton"),
        "VLLM_CACHE_ROOT": str(MADE / "vllm"),
        "SGLANG_JIT_CACHE_DIR": str(MADE / "sglang"),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "EMULATED_GPU_DEVICES": str(devices),
        "EMULATED_GPU_OPERATORS": str(operators),
        "VLLM_USE_DEEP_GEMM": "0",  # nobody computes what it compiles
        "TORCHDYNAMO_DISABLE": "1",  # what it compiles for a GPU would be launched
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    main()
