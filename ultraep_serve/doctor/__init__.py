"""What would keep a server on this machine from balancing, and what to do about it.

Each check is a function that returns what it found and changes nothing. No engine is imported.
"""

from ultraep_serve.doctor.finding import Finding, Status, Subject
from ultraep_serve.doctor.gpus import check_gpus
from ultraep_serve.doctor.memory import check_memory, check_shared_memory
from ultraep_serve.doctor.serving import check_flags, check_hosts, check_model, check_server
from ultraep_serve.doctor.versions import check_versions

__all__ = ["Finding", "Status", "Subject", "diagnose"]


def diagnose(subject: Subject) -> list[Finding]:
    """Every check, in the order in which a reader wants them."""
    return [
        *check_versions(subject),
        *check_gpus(),
        check_shared_memory(subject),
        *check_memory(subject),
        *check_model(subject),
        *check_flags(subject),
        *check_hosts(subject),
        *check_server(subject),
    ]
