"""What is to be served, or runs: its model and flags, its ranks on hosts, and how it answers."""

import ssl
from collections.abc import Callable
from contextlib import closing
from http import HTTPStatus
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from ultraep_serve.config import SidecarSettings
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, warning
from ultraep_serve.errors import NoServerError, UnsupportedError
from ultraep_serve.launcher.engine import count_experts
from ultraep_serve.sidecar.status import ServerStatus, status_reader
from ultraep_serve.system.listeners import listening_addresses
from ultraep_serve.system.machine import address_of
from ultraep_serve.system.topology import locate
from ultraep_serve.telemetry.run_directory import find_run, process_of_run
from ultraep_serve.telemetry.run_files import RunFiles

_CHANNELS = Path("/dev/nvidia-caps-imex-channels")  # by which GPUs share memory between hosts
_SECONDS = 30.0  # SGLang says after 20 s that nothing came of the prompt that its /health sends


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


def check_hosts(subject: Subject) -> list[Finding]:
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
    if domain > here and not (_CHANNELS.is_dir() and any(_CHANNELS.iterdir())):
        seen += f", on {domain // here} hosts; no IMEX channel is here, by which GPUs reach others"
        remedy = f"run nvidia-imex on all hosts, with a channel in {_CHANNELS}, or --domain-size 0"
        return [error("hosts", seen, remedy)]
    return [ok("hosts", seen)]


def check_server(subject: Subject) -> list[Finding]:
    """How a running server answers and balances; nothing where it is to be started."""
    port = subject.port
    if port is None or subject.refusal is not None:
        return []
    try:
        path = find_run(port=port)
    except NoServerError as reason:
        return [warning("server", str(reason), "or run this as the user who started it")]
    process = process_of_run(path)
    hosts = listening_addresses(port, process) if process else []
    engine = [_engine_health(host, port) for host in hosts]
    return [*engine, _readiness(status_reader(run_dir=path)), *_sidecar_health(path)]


def _engine_health(host: str, port: int) -> Finding:
    name, where = "server", address_of(host, port)
    try:
        where, status = _ask(host, port, "/health")
    except (OSError, HTTPException) as reason:
        seen = f"{where}: no answer ({reason})"
        return error(name, seen, "wait until the model is loaded; then read the engine's log")
    if not status:
        remedy = "if it wants clients' certificates, ask it with one; else read the engine's log"
        return warning(name, f"{where}: it hangs up on a client without a certificate", remedy)
    if status != HTTPStatus.OK:
        return error(name, f"{where} answers {status}", "read the engine's log")
    return ok(name, f"{where} answers {status}")


def _sidecar_health(path: Path) -> list[Finding]:
    """Nothing where the server has none, or one whose port its log alone names."""
    settings = (RunFiles(path).config() or {}).get("sidecar")
    sidecar = SidecarSettings(**settings) if settings else SidecarSettings(port=0)
    port = sidecar.port_beside()
    if not port:
        return []
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(sidecar.host, sidecar.host)
    try:
        where, status = _ask(host, port, "/healthz")
    except (OSError, HTTPException) as reason:
        where, status = f"{address_of(host, port)}: no answer ({reason})", 0
    if status == HTTPStatus.OK:
        return [ok("sidecar", f"{where} answers {status}")]
    remedy = (
        "balancing goes on without page, metrics and readiness: start another with "
        f"`ultraep-serve sidecar --host {sidecar.host} --port {port}`"
    )
    return [warning("sidecar", f"{where} answers {status}" if status else where, remedy)]


def _ask(host: str, port: int, path: str) -> tuple[str, int]:
    """The address that was asked, and the status that it answers; by TLS where it speaks that.

    The status is 0 where it hangs up after the handshake. Raises OSError and HTTPException.
    """
    where = f"{address_of(host, port)}{path}"
    try:
        return f"http://{where}", _status(HTTPConnection(host, port, timeout=_SECONDS), path)
    except (BadStatusLine, ConnectionResetError, BrokenPipeError) as reason:
        context = ssl.create_default_context()
        context.check_hostname = False  # it is on this machine, whoever its certificate names
        context.verify_mode = ssl.CERT_NONE
        secure = HTTPSConnection(host, port, timeout=_SECONDS, context=context)
        try:
            secure.connect()
        except OSError:
            raise reason from None  # it does not speak TLS either
        try:
            return f"https://{where}", _status(secure, path)
        except (OSError, HTTPException):
            return f"https://{where}", 0


def _status(connection: HTTPConnection, path: str) -> int:
    with closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def _readiness(read: Callable[[], ServerStatus]) -> Finding:
    name, found = "balancing", read().document
    shown = "; ".join(f"{rank}: {reason}" for rank, reason in found["reasons"].items())
    if not found["ready"]:
        remedy = "read the engine's log for that rank; restart the server"
        return error(name, f"not ready ({shown})", remedy)
    if found["reasons"]:
        remedy = "put right what it names, or refuse such a start with --on-unsupported=error"
        if "switched itself off" in shown:
            remedy = "report it with the engine's log; set a policy to balance again"
        return warning(name, shown, remedy)
    return ok(name, "every rank of this host has joined and is alive")
