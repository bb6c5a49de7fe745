"""What is to be served, or runs: its model and flags, its ranks on hosts, and how it answers."""

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from ultraep_serve.doctor.finding import Finding, Subject, error, ok, warning
from ultraep_serve.errors import NoServerError, UnsupportedError
from ultraep_serve.launcher.engine import count_experts
from ultraep_serve.sidecar.direct import ServerStatus, status_reader
from ultraep_serve.system.topology import locate

__all__ = ["check_flags", "check_hosts", "check_model", "check_server"]

_CHANNELS = Path("/dev/nvidia-caps-imex-channels")  # by which GPUs share memory between hosts
_SECONDS = 5.0


def check_model(subject: Subject) -> list[Finding]:
    """How a model's experts lie on ranks; what is wrong with them is the launcher's refusal."""
    experts = count_experts(subject.model) if subject.model is not None else None
    if experts is None:
        return []
    ranks = subject.ranks.in_stage
    seen = f"{experts} experts in each MoE layer, {experts // ranks} on each of {ranks} ranks"
    return [ok("model", seen)]


def check_flags(subject: Subject) -> list[Finding]:
    """What the launcher has against the command that is to serve; nothing where none is given."""
    if subject.refusal is None:
        return []
    if not subject.refusal:
        return [ok("flags", "the launcher would start this command")]
    seen, _, remedy = subject.refusal.rpartition("; ")
    return [error("flags", seen or remedy, remedy)]


def check_hosts(subject: Subject, channels: Path = _CHANNELS) -> list[Finding]:
    """Which ranks are on which host and in which domain, as ranks will find when they meet.

    Nothing where no command is given.
    """
    if subject.refusal is None:
        return []
    ranks, here = subject.ranks.in_stage, subject.ranks.in_stage_here
    hosts = [rank // here for rank in range(ranks)]
    try:
        domain = locate(0, hosts, subject.config.domain_size).domain_size
    except UnsupportedError as refusal:
        seen, _, remedy = refusal.problem.partition("; ")
        return [error("hosts", seen, remedy)]
    on_hosts = f" on {ranks // here} hosts, {here} on each" if ranks > here else " here"
    in_domains = f"{ranks // domain} domains of {domain}" if ranks > domain else "one domain"
    seen = f"{ranks} ranks{on_hosts}; {in_domains}"
    if domain > here and not (channels.is_dir() and any(channels.iterdir())):
        seen += f", on {domain // here} hosts; no IMEX channel is here, by which GPUs reach others"
        remedy = f"run nvidia-imex on all hosts, with a channel in {channels}, or --domain-size 0"
        return [error("hosts", seen, remedy)]
    return [ok("hosts", seen)]


def check_server(subject: Subject) -> list[Finding]:
    """How a running server answers and balances; nothing where it is to be started."""
    if subject.port is None or subject.refusal is not None:
        return []
    try:
        read = status_reader(subject.port)
    except NoServerError as reason:
        return [warning("server", str(reason), "or run this as the user who started it")]
    return [_engine_health(subject.port), _readiness(read)]


def _engine_health(port: int) -> Finding:
    # Never through a proxy: this is the local machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=_SECONDS):
            return ok("server", f"port {port}: /health answers 200")
    except urllib.error.HTTPError as refusal:
        seen = f"port {port}: /health answers {refusal.code}"
        refusal.close()
        return error("server", seen, "read the engine's log")
    except (OSError, ValueError) as reason:
        seen = f"127.0.0.1:{port}: no answer ({getattr(reason, 'reason', reason)})"
        return error("server", seen, "wait until the model is loaded; then read the engine's log")


def _readiness(read: Callable[[], ServerStatus]) -> Finding:
    """What `ultraep-serve status` says of the ranks."""
    name, found = "balancing", read()
    shown = "; ".join(f"{rank}: {reason}" for rank, reason in found.reasons.items())
    if not found.ready:
        remedy = "read the engine's log for that rank; restart the server"
        return error(name, f"not ready ({shown})", remedy)
    if found.reasons:
        remedy = "put right what it names, or refuse such a start with --on-unsupported=error"
        if "switched itself off" in shown:
            remedy = "report it with the engine's log; set a policy to balance again"
        return warning(name, shown, remedy)
    return ok(name, "every rank of this host has joined and is alive")
