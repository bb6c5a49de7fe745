"""What would keep a server on this machine from balancing, and what to do about it.

Each check is a function that returns what it found and changes nothing. No engine is imported.
"""

from ultraep_serve.doctor.engines import check_command, check_engines, check_package
from ultraep_serve.doctor.finding import Finding, Status, Subject
from ultraep_serve.doctor.gpus import check_cliques, check_gpus
from ultraep_serve.doctor.host_machine import (
    check_cores,
    check_leftovers,
    check_memory_access,
    check_scheduling,
    check_shared_memory,
)
from ultraep_serve.doctor.hosts import check_domains, check_hosts
from ultraep_serve.doctor.model import check_model
from ultraep_serve.doctor.running_server import check_ports, check_server

__all__ = ["Finding", "Status", "Subject", "diagnose"]


def diagnose(subject: Subject) -> list[Finding]:
    """Every check, in the order in which a reader wants them."""
    return [
        check_package(),
        *check_engines(newer=subject.on_newer_engine),
        *check_gpus(),
        *check_cliques(),
        check_hosts(subject),
        check_domains(subject),
        *check_command(subject),
        check_cores(subject),
        check_scheduling(),
        check_memory_access(),
        check_shared_memory(subject),
        *check_leftovers(),
        *check_model(subject),
        *check_ports(subject),
        *check_server(subject),
    ]
