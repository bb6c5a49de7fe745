"""Which ranks are on which host and in which domain, and which of them NVLink joins."""

from pathlib import Path

from ultraep_serve.balance.topology import domain_of, domains_fit
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, warning
from ultraep_serve.doctor.gpus import NvidiaSmi, link_domains, nvidia_smi

__all__ = ["check_domains", "check_hosts"]

_CHANNELS = Path("/dev/nvidia-caps-imex-channels")  # by which GPUs share memory between hosts


def check_hosts(subject: Subject) -> Finding:
    """Whether every host gets equally many ranks, as domains need."""
    ranks, here = subject.num_ranks, subject.ranks_here
    if ranks % here:
        return error(
            "hosts",
            f"{ranks} ranks, {here} of them on this host: others would hold fewer or more",
            f"start equally many ranks on each host: {_listed(_divisors(ranks))}",
            ranks=ranks,
            ranks_here=here,
        )
    hosts = ranks // here
    seen = f"{ranks} ranks on {hosts} hosts, {here} on each" if hosts > 1 else f"{ranks} ranks here"
    return ok("hosts", seen, ranks=ranks, ranks_here=here, hosts=hosts)


def check_domains(
    subject: Subject, run: NvidiaSmi = nvidia_smi, channels: Path = _CHANNELS
) -> Finding:
    """Whether --domain-size fits the hosts, and its ranks reach each other's memory."""
    here, size = subject.ranks_here, subject.domain_size or subject.ranks_here
    if not domains_fit(size, here, subject.num_ranks):
        return error(
            "domains",
            f"--domain-size {size} does not divide the {here} ranks of a host, nor make equal "
            "groups of hosts",
            f"choose one that does: {_listed(_divisors(here))}; or 0, for a whole host",
            ranks_here=here,
            domain_size=size,
        )
    num_domains = subject.num_ranks // size
    seen = f"{num_domains} of {size} ranks each" if num_domains > 1 else f"one of {size} ranks"
    if size > here:
        seen += f", on {size // here} hosts"
        if channels.is_dir() and any(channels.iterdir()):
            return ok("domains", f"{seen}; an IMEX channel is here", domain_size=size)
        return error(
            "domains",
            f"{seen}; no IMEX channel here, by which GPUs reach the memory of other hosts",
            f"run nvidia-imex on all hosts, with a channel in {channels}, or --domain-size {here}",
            domain_size=size,
        )
    joined = _joined_ranks(here, run(["topo", "-m"]))
    if joined is None:
        return ok("domains", seen, domain_size=size)
    fitting = _fitting_size(here, joined)
    figures = {"domain_size": size, "fitting_domain_size": fitting, "nvlink_domains": joined}
    shown = "; ".join(",".join(map(str, ranks)) for ranks in joined)
    seen += f"; NVLink joins {f'ranks {shown}' if len(joined) > 1 else 'all ranks'} of this host"
    if _fits(here, size, joined):
        if size < fitting:
            seen += f", so --domain-size {fitting} would fit too and even out more"
        return ok("domains", seen, **figures)
    if fitting == 1:
        remedy = "order the GPUs so that ranks joined by NVLink follow each other"
        remedy += " (CUDA_VISIBLE_DEVICES); weights would leave NVLink in any domain"
    else:
        remedy = f"--domain-size {fitting}: weights then move over NVLink alone"
    return warning("domains", seen, remedy, **figures)


def _joined_ranks(here: int, matrix: str | None) -> list[list[int]] | None:
    """This host's ranks, counted from 0, by what NVLink joins; None where GPUs are too few."""
    domains = link_domains(matrix or "")
    if sum(map(len, domains)) < here:
        return None
    used = ([gpu for gpu in domain if gpu < here] for domain in domains)  # rank i takes GPU i
    return [domain for domain in used if domain]


def _fitting_size(here: int, joined: list[list[int]]) -> int:
    """The largest domain whose ranks NVLink joins everywhere on this host."""
    return max(size for size in _divisors(here) if _fits(here, size, joined))


def _fits(here: int, size: int, joined: list[list[int]]) -> bool:
    domains = (set(domain_of(first, here, size)) for first in range(0, here, size))
    return all(any(domain <= set(ranks) for ranks in joined) for domain in domains)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
