"""What stands in the way of serving with balancing on this machine, and what to do about it.

Each check is a function that returns findings and changes nothing. No engine is imported.
"""

from ultraep_serve.diagnosis.cliques import check_cliques
from ultraep_serve.diagnosis.engines import check_engines, check_package
from ultraep_serve.diagnosis.finding import Finding, Status, Subject
from ultraep_serve.diagnosis.gpus import check_gpus
from ultraep_serve.diagnosis.hosts import check_domains, check_hosts
from ultraep_serve.diagnosis.machine import check_cores, check_memory_access
from ultraep_serve.diagnosis.model import check_model
from ultraep_serve.diagnosis.server import check_ports, check_server
from ultraep_serve.diagnosis.shared_memory import check_leftovers, check_shared_memory

__all__ = ["Finding", "Status", "Subject", "diagnose"]


def diagnose(subject: Subject) -> list[Finding]:
    """Every check, in the order in which a reader wants them."""
    return [
        *check_package(),
        *check_engines(),
        *check_gpus(),
        *check_cliques(),
        *check_hosts(subject),
        *check_domains(subject),
        *check_cores(subject),
        *check_memory_access(),
        *check_shared_memory(subject),
        *check_leftovers(),
        *check_model(subject),
        *check_ports(subject),
        *check_server(subject),
    ]
