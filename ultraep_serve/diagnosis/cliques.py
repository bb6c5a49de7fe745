"""Where NVLink joins hosts: the clique of this host's GPUs, as nvidia-smi tells."""

from ultraep_serve.diagnosis.finding import Finding, ok, warning
from ultraep_serve.diagnosis.gpus import NvidiaSmi, nvidia_smi

__all__ = ["check_cliques"]

_QUERY = ["--query-gpu=fabric.state,fabric.clusterUuid,fabric.cliqueId", "--format=csv,noheader"]
_FIELDS = 3
_LABEL = "nvidia.com/gpu.clique"  # of a Kubernetes node, with the same value


def check_cliques(run: NvidiaSmi = nvidia_smi) -> list[Finding]:
    """The clique that NVLink joins this host's GPUs to; nothing where NVLink ends at the host.

    Hosts of one clique exchange tokens over NVLink. Weights move inside a host in any case.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in (run(_QUERY) or "").splitlines()]
    rows = [row for row in rows if len(row) == _FIELDS and _has_cluster(row[1])]
    if not rows:
        return []
    unfinished = {state for state, _, _ in rows} - {"Completed"}
    if unfinished:
        return [
            warning(
                "clique",
                f"NVLink between hosts is not set up: {', '.join(sorted(unfinished))}",
                "wait for the fabric manager, or read its log; until then tokens take the network",
            )
        ]
    cliques = sorted({f"{cluster}.{clique}" for _, cluster, clique in rows})
    if len(cliques) > 1:
        seen = f"GPUs of this host are in {len(cliques)} cliques: {', '.join(cliques)}"
        remedy = "give a server GPUs of one clique; between cliques tokens take the network"
        return [warning("clique", seen, remedy, cliques=cliques)]
    seen = f"{cliques[0]}: NVLink carries tokens to hosts of the same ({_LABEL}); weights stay here"
    return [ok("clique", seen, cliques=cliques)]


def _has_cluster(uuid: str) -> bool:
    """Zeros, or a word like [N/A], where NVLink ends at the host."""
    return bool(set(uuid) & set("123456789abcdef")) and "-" in uuid
