"""Compile CUDA's libraries; stubs stand for whatever their C files do not define."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIBRARIES", "build"]

FOLDER = Path(__file__).resolve().parent
HEADERS = ("nvidia/cu13", "triton/backends/nvidia")
OPTIONS = "-c -fPIC -O2 -Wall -Werror -fno-strict-aliasing -fvisibility=hidden -march=native"
VISIBLE = (
    "#pragma GCC visibility push(default)\nint gpu_lacks(const char *), gpu_refuses(const char *);"
)
# Of the driver and the runtime, what succeeds by doing nothing; other stubs say "not supported".
DONE_BY_DOING_NOTHING = re.compile(
    r"""cu(da)?( Init | Ctx(SetLimit|SetCacheConfig|EnablePeerAccess)
    | DevicePrimaryCtx(Release|SetFlags) | Device(EnablePeerAccess|SetLimit)
    | MemSetAccess | Mem(Prefetch|Advise)\w* | MemPool(Set|Trim)\w*
    | (Module|Library)Unload | (Func|Kernel)Set\w*
    | Stream(Destroy|WriteValue|BatchMemOp)\w*
    | ThreadExchangeStreamCaptureMode | Graph(Upload|Destroy|DebugDot)\w*
    | TensorMapEncode\w* | Profiler\w* | PointerSetAttribute
    | MemcpyToSymbol\w* )(_v\d)? | __cuda\w+""",
    re.VERBOSE,
)
# Of cuBLAS and NCCL; what else cuBLAS has computes, and is refused; of NCCL it is lacking.
HANDLES = re.compile(
    r"""cublas\w*(Create|Destroy|Init|Set|Get|Logger|Shutdown|Xerbla|DisableCpu)\w*
    | p?nccl(Comm(Destroy|Finalize|(Window)?(Register|Deregister))|RedOpDestroy)""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Library:
    """A library, what it is made of, and where the names are that it must have."""

    file: str
    sources: tuple[str, ...]
    names: str  # below site-packages: a library, or a header
    version: str = ""  # of its symbols
    is_done: re.Pattern[str] = HANDLES  # stubs that succeed
    otherwise: str = "gpu_lacks"  # what other stubs call, and return


LIBRARIES = (  # in the order in which they are to be loaded
    Library(
        "libcuda.so.1",
        ("device.c", "stream.c", "execute.c", "driver.c"),
        "triton/backends/nvidia/include/cuda.h",
        is_done=DONE_BY_DOING_NOTHING,
    ),
    Library(
        "libcudart.so.13",
        ("runtime.c",),
        "nvidia/cu13/lib/libcudart.so.13",
        "libcudart.so.13",
        DONE_BY_DOING_NOTHING,
    ),
    Library("libnvidia-ml.so.1", ("management.c",), ""),
    Library(
        "libcublasLt.so.13",
        ("blas_lt.c",),
        "nvidia/cu13/lib/libcublasLt.so.13",
        "libcublasLt.so.13",
        otherwise="gpu_refuses",
    ),
    Library(
        "libcublas.so.13",
        ("blas.c",),
        "nvidia/cu13/lib/libcublas.so.13",
        "libcublas.so.13",
        otherwise="gpu_refuses",
    ),
    Library("libnccl.so.2", ("collectives.c",), "nvidia/nccl/lib/libnccl.so.2", "NCCL_2"),
)


def build(site: Path, target: Path, libraries: Sequence[Library] = LIBRARIES) -> list[Path]:
    """Compile them into ``target``. ``site``: packages, with torch for CUDA 13 and all it needs.

    The first one, the driver, needs Triton alone.
    """
    target.mkdir(parents=True, exist_ok=True)
    made = [_build(library, site.resolve(), target.resolve()) for library in libraries]
    for path in made:  # as a linker looks for it
        unversioned = target / f"{path.name.partition('.so')[0]}.so"
        unversioned.unlink(missing_ok=True)
        unversioned.symlink_to(path.name)
    return made


def _build(library: Library, site: Path, target: Path) -> Path:
    made = target / library.file
    included = [f"-I{site / folder / 'include'}" for folder in HEADERS]
    compiling = ["gcc", *OPTIONS.split(), *included]
    linking = ["gcc", "-shared", "-o", str(made), f"-Wl,-soname,{library.file}"]
    others = [] if library.file == "libcuda.so.1" else [f"-L{target}", "-l:libcuda.so.1"]
    with tempfile.TemporaryDirectory(dir=target) as folder:
        work = Path(folder)
        sources = [str(FOLDER / source) for source in library.sources]
        subprocess.run([*compiling, *sources], cwd=work, check=True)
        if library.names:
            defined = set().union(*(_symbols(path) for path in work.glob("*.o")))
            missing = sorted(_names(site / library.names, included) - defined)
            stubs = work / "stubs.c"
            stubs.write_text("\n".join([VISIBLE, *(_stub(library, name) for name in missing)]))
            subprocess.run([*compiling, "-fno-builtin", stubs], cwd=work, check=True)
        if library.version:
            script = work / "symbols.map"
            script.write_text(f"{library.version} {{ global: *; }};\n")
            linking.append(f"-Wl,--version-script={script}")
        objects = map(str, work.glob("*.o"))
        subprocess.run([*linking, *objects, *others, "-ldl", "-lpthread"], check=True)
    return made


def _stub(library: Library, name: str) -> str:
    result = "0" if library.is_done.fullmatch(name) else f'{library.otherwise}("{name}")'
    return f"int {name}(void) {{ return {result}; }}"


def _names(source: Path, included: list[str]) -> set[str]:
    """Functions that a header declares or a library exports."""
    if source.suffix != ".h":
        return _symbols(source, "--dynamic")
    command = ["gcc", "-E", "-P", *included, str(source)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", text))


def _symbols(path: Path, *options: str) -> set[str]:
    """That an object or, with the option "--dynamic", a library offers to others."""
    command = ["nm", *options, "--defined-only", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    words = [line.split() for line in lines]
    names = {name.split("@")[0] for _, kind, name in words if kind in "TWi"}
    return names - {"_init", "_fini"}
