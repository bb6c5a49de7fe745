"""The kit where it is used: its pieces put together, and what a process needs to find it."""

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import IO

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
ARCHIVE = "kit.tar.xz"
SHIM = "libnccl_shim.so"


def missing_piece(kit: Path) -> str | None:
    """The next piece of the kit that has to be brought; None once all are here, or unpacked."""
    if _is_unpacked(kit):
        return None
    found = {path.name for path in kit.glob(f"{ARCHIVE}.*")}
    number = next((name.rpartition("of")[2] for name in found), "")
    wanted = [f"{ARCHIVE}.{n}of{number}" for n in range(1, int(number or 0) + 1)]
    return next((name for name in wanted if name not in found), None if wanted else "the first one")


def unpack(kit: Path) -> None:
    """Put the pieces together, link vLLM's names for NCCL, and register this checkout as it is."""
    if not _is_unpacked(kit):
        half = kit / "half"
        shutil.rmtree(half, ignore_errors=True)
        pieces = sorted(kit.glob(f"{ARCHIVE}.*"))
        with subprocess.Popen(["cat", *pieces], stdout=subprocess.PIPE) as joined:
            assert joined.stdout is not None
            _extract(joined.stdout, half)
        _link_shim(half)
        half.rename(kit / "site")
    _register(kit / "site")


def environment(kit: Path) -> dict[str, str]:
    """Of processes that use the kit, on a machine that reaches no other."""
    site = kit.resolve() / "site"
    path = [
        str(site),
        *(str(ROOT / part) for part in ("", "kernels", "benchmarks")),
        os.environ.get("PYTHONPATH", ""),
    ]
    assembler = _assembler()
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_PTXAS_PATH": assembler,  # the kit's Triton has none
        "TRITON_PTXAS_BLACKWELL_PATH": assembler,
        "VLLM_NCCL_SO_PATH": str(site / SHIM),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # an engine is imported many times
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    }


def _is_unpacked(kit: Path) -> bool:
    return (kit / "site").is_dir()


def _extract(source: IO[bytes], folder: Path) -> None:
    with tarfile.open(fileobj=source, mode="r|xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from 3.11.4 on
        archive.extractall(folder)


def _register(site: Path) -> None:
    """Entry points of this checkout, as installing it would register them."""
    import tomllib  # from Python 3.11 on

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = site / "ultraep_serve-0.dist-info"
    own.mkdir(exist_ok=True)
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: ultraep-serve\nVersion: 0\n")
    groups = project["entry-points"] | {"console_scripts": project["scripts"]}
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (own / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _link_shim(site: Path) -> None:
    nccl = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    if nccl is None or nccl.submodule_search_locations is None:
        return  # no torch for CUDA
    folder = Path(nccl.submodule_search_locations[0], "lib")
    source, made = FOLDER / "one_gpu" / "nccl_shim.c", site / SHIM
    needed = ["-Wl,--no-as-needed", f"-L{folder}", "-l:libnccl.so.2", f"-Wl,-rpath,{folder}"]
    subprocess.run(["gcc", "-shared", "-fPIC", source, *needed, "-o", made], check=True)


def _assembler() -> str:
    """``ptxas`` of a toolkit, or of the Triton that the machine has itself."""
    own = Path(sys.prefix, "lib", "python{}.{}".format(*sys.version_info), "site-packages")
    in_triton = own / "triton" / "backends" / "nvidia" / "bin" / "ptxas"
    return (
        shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin") or str(in_triton)
    )
