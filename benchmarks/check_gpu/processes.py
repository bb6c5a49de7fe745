"""The parts in their order, and the command of each; nothing here imports torch."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files, version
from importlib.util import find_spec
from pathlib import Path

CANNOT_RUN = 77  # exit status of a part whose last line says why
FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SANITIZER = "compute-sanitizer"
SANITIZER_PACKAGE = "nvidia-cuda-sanitizer-api"
FORMATS = "fp8", "int8", "int4", "mxfp4", "nvfp4"
SECONDS_TO_END = 10  # that benchmarks/device keeps for its report

Command = tuple[Sequence[str], str]  # or the reason why there is none


@dataclass(frozen=True)
class Part:
    """One process."""

    name: str
    seconds: float  # at most, on a GPU
    make: Callable[[Path, bool, float], Command]
    file: str = "rows.jsonl"  # that it writes; a report is JSON

    def command(self, found: Path, dry_run: bool, limit: float) -> Command:
        """What to run, ``found`` being the file that it writes; or why it cannot run here."""
        command, reason = self.make(found, dry_run, limit)
        if not command:
            return command, reason
        places = [str(ROOT / folder) for folder in ("", "kernels", "benchmarks")]
        path = os.pathsep.join(filter(None, [*places, os.environ.get("PYTHONPATH")]))
        interpreted = ["TRITON_INTERPRET=1"] if dry_run else []
        return ["env", f"PYTHONPATH={path}", *interpreted, *command], ""


def _device(found: Path, dry_run: bool, limit: float) -> Command:
    # of its own time a dry run has as many times more
    seconds = limit / (5 if dry_run else 1) - SECONDS_TO_END
    command = [sys.executable, str(ROOT / "benchmarks" / "device"), "--json", str(found)]
    return [*command, "--seconds", f"{seconds:.0f}", *(["--dry-run"] if dry_run else [])], ""


def _sanitizer(tool: str) -> Callable[[Path, bool, float], Command]:
    def make(found: Path, dry_run: bool, _: float) -> Command:
        if dry_run:
            return (), f"{SANITIZER} needs a GPU"
        program = _sanitizer_path()
        if program is None:
            return (), f"no {SANITIZER}: neither on PATH nor from {SANITIZER_PACKAGE}"
        options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        return [program, *options, *_script("small.py", found)], ""

    return make


def _sanitizer_path() -> str | None:
    """The tool of a CUDA toolkit, or of a package in this environment."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    if found := shutil.which(SANITIZER) or shutil.which(SANITIZER, path=str(toolkit)):
        return found
    try:
        of_package = files(SANITIZER_PACKAGE) or []
    except PackageNotFoundError:
        return None
    programs = [file for file in of_package if file.parent.name == SANITIZER]
    # not the script beside it, which a package manager may have left without its permission
    paths = [Path(str(file.locate())) for file in programs if file.name == SANITIZER]
    return str(paths[0]) if paths else None


def _global_sanitizer(found: Path, dry_run: bool, _: float) -> Command:
    if dry_run:
        return (), "Triton's global sanitizer needs a GPU"
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        return (), "Triton is not installed"
    if not (Path(triton.origin).parent / "experimental" / "gsan").is_dir():
        return (), f"Triton {version('triton')} has no global sanitizer; 3.9 has one"
    return _script("small.py", found, "--global-sanitizer"), ""


def _small(found: Path, dry_run: bool, _: float) -> Command:
    return _script("small.py", found), ""


def _experts(library: str) -> Callable[[Path, bool, float], Command]:
    def make(found: Path, dry_run: bool, _: float) -> Command:
        if library != "torch":
            if find_spec(library) is None:
                return (), f"{library} is not installed"
            if dry_run:
                return (), f"the expert kernels of {library} need a GPU"
        return _script("experts.py", found, library), ""

    return make


def _engine(library: str, *script: str) -> Callable[[Path, bool, float], Command]:
    def make(found: Path, dry_run: bool, _: float) -> Command:
        if find_spec(library) is None:
            return (), f"{library} is not installed"
        if dry_run and script != ("engine.py",):
            return (), "a server of its own kernels needs a GPU; the tests start one on a CPU"
        name, *arguments = script
        return _script(name, found, *arguments), ""

    return make


def _values(found: Path, dry_run: bool, _: float) -> Command:
    return [sys.executable, str(ROOT / "tests" / "emulated_gpu" / "values.py"), str(found)], ""


def _libraries(found: Path, dry_run: bool, _: float) -> Command:
    return ((), "libraries of a GPU") if dry_run else (_script("libraries.py", found), "")


def _script(name: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, str(FOLDER / name), *map(str, arguments)]


PARTS = (
    Part("kit", 60, _libraries),
    Part("engine", 210, _engine("vllm", "engine.py")),
    Part("server-vllm", 240, _engine("vllm", "servers.py", "vllm")),
    Part("server-sglang", 150, _engine("sglang", "servers.py", "sglang")),
    Part("formats", 140, _engine("vllm", "engine.py", *FORMATS)),
    Part("experts-vllm", 140, _experts("vllm")),
    Part("device", 160, _device, "report.json"),
    Part("small", 80, _small),
    Part("memcheck", 100, _sanitizer("memcheck")),
    Part("synccheck", 90, _sanitizer("synccheck")),
    Part("racecheck", 60, _sanitizer("racecheck")),
    Part("global-sanitizer", 90, _global_sanitizer),
    Part("experts-torch", 50, _experts("torch")),
    Part("experts-sglang", 60, _experts("sglang")),
    Part("first-token", 150, _engine("vllm", "first_token.py")),
)
if "EMULATED_GPU_OPERATORS" in os.environ:
    PARTS += (Part("values", 600, _values),)
