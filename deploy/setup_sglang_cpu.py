"""Make a virtual environment with SGLang for CPU and this project in it.

    python3 deploy/setup_sglang_cpu.py [.venv-sglang] [--no-dev]

Standard library only. Does nothing when the environment is complete already. SGLang's own
requirements hold CUDA packages that a CPU machine cannot load, so it is installed without them and
what it imports on CPU is listed here. Two packages that it imports have no CPU build beside it:
modules of ``sglang_cpu_standins`` stand in for them, behind real packages of the same names. The
CPU build of torch comes from wherever pip is configured to look for it.
"""

import argparse
import sys
from pathlib import Path

from environment import ROOT, Environment

SGLANG = "sglang==0.5.23"
STANDINS = Path(__file__).resolve().parent / "sglang_cpu_standins"
PINNED = (  # as SGLang 0.5.23 pins them
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0",
    "dill==0.4.1",
    "gguf==0.19.0",
    "llguidance==1.9.1",
    "openai-harmony==0.0.4",
    "openai==2.8.0",
    "sentencepiece==0.2.1",
    "soundfile==0.13.1",
    "tokenizers==0.23.2",
    "transformers==5.19.0",
    "triton==3.9.0",
    "xgrammar==0.2.7",
)
UNPINNED = (
    *("aiohttp", "distro", "einops", "fastapi", "interegular", "IPython", "jsonschema", "msgspec"),
    *("numpy", "orjson", "packaging", "partial_json_parser", "pillow", "prometheus-client"),
    *("psutil", "pybase64", "pydantic", "python-multipart", "pyzmq", "regex", "requests", "scipy"),
    *("setproctitle", "tiktoken", "tqdm", "uvicorn", "uvloop", "xxhash", "zstandard"),
)
OURS = (
    "numba==0.65.0",  # as in vLLM's environment: both keep compiled kernels in the same place
    *("httpx", "rich"),
)
FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist")


def main() -> int:
    """Set up the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=Path(".venv-sglang"))
    parser.add_argument("--no-dev", action="store_true", help="without tests")
    arguments = parser.parse_args()
    environment = Environment(arguments.path.resolve(), Path(__file__))
    if environment.is_complete:
        return 0
    environment.create()
    print("installing SGLang and this project (a few minutes)", flush=True)
    packages = (*PINNED, *UNPINNED, *OURS, *(() if arguments.no_dev else FOR_TESTS))
    environment.pip("install", "--quiet", *packages)
    # Last, or pip would list all that it misses whenever it installs something.
    environment.pip("install", "--quiet", "--no-deps", SGLANG)
    environment.pip("install", "--quiet", "--no-deps", "--editable", str(ROOT))
    environment.add_to_path(STANDINS)
    environment.mark_complete()
    return 0


if __name__ == "__main__":
    sys.exit(main())
