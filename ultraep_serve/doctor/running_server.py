"""Ports that are free, and the health of a server that runs."""

import json
import urllib.error
import urllib.request
from typing import Any

from ultraep_serve.config import SIDECAR_DISTANCE
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, warning
from ultraep_serve.system.machine import why_not_listen
from ultraep_serve.telemetry.run_directory import is_running, run_directory_of_port

__all__ = ["check_ports", "check_server"]

_DEFAULT_PORTS = {"vLLM": 8000, "SGLang": 30000}
_SECONDS = 5.0
_MAX_BYTES = 1 << 20


def check_ports(subject: Subject) -> list[Finding]:
    """Whether server and sidecar could start on their ports, or else on the engines' defaults."""
    if subject.port is not None:
        if is_running(subject.port):
            return [_already_running(subject)]
        wanted = {"the server": (subject.host, subject.port)} if subject.serves else {}
        if subject.has_sidecar:
            wanted["the sidecar"] = (subject.sidecar_host, _sidecar_port(subject))
        return [_check_port(*address, who) for who, address in wanted.items()]
    return [_check_default(title, port) for title, port in _DEFAULT_PORTS.items()]


def check_server(subject: Subject) -> list[Finding]:
    """What a running server and its sidecar answer; nothing where no port is given."""
    if subject.port is None:
        return []
    if not is_running(subject.port):
        if subject.command is not None:
            return []  # it is to be started
        seen = f"no balanced server of this user runs on port {subject.port}"
        place = run_directory_of_port(subject.port)
        remedy = f"start one, or run this as the user who did (a server has a {place})"
        return [warning("server", seen, remedy)]
    findings = []
    if subject.serves:
        engine = _get(f"http://127.0.0.1:{subject.port}/health")
        findings.append(_engine_health(subject.port, engine))
    sidecar = _get(f"http://127.0.0.1:{_sidecar_port(subject)}/readyz")
    return [*findings, _readiness(_sidecar_port(subject), sidecar)]


def _engine_health(port: int, answer: "tuple[int, bytes] | str") -> Finding:
    if isinstance(answer, str):
        remedy = "wait until the model is loaded; then read the engine's log"
        return error("server", f"port {port}: {answer}", remedy)
    code, _ = answer
    if code == 200:
        return ok("server", f"port {port}: /health answers 200")
    return error("server", f"port {port}: /health answers {code}", "read the engine's log")


def _readiness(port: int, answer: "tuple[int, bytes] | str") -> Finding:
    name = "balancing"
    if isinstance(answer, str):
        remedy = "give its port with --sidecar-port; a server with --policy off has none"
        return error(name, f"sidecar, port {port}: {answer}", remedy)
    code, body = answer
    if code == 200 and "run" in (reasons := _reasons(body)):
        remedy = "put right what it names, or refuse such a start with --on-unsupported=error"
        if "switched itself off" in str(reasons["run"]):
            remedy = "write a report with --report FILE; set a policy to balance again"
        return warning(name, f"sidecar, port {port}: {reasons['run']}", remedy)
    if code == 200:
        return ok(name, f"sidecar, port {port}: every rank of this host has joined and is alive")
    reasons = _reasons(body)
    shown = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
    remedy = "read the engine's log for that rank; restart the server"
    return error(name, f"sidecar, port {port}: /readyz answers {code} ({shown})", remedy)


def _reasons(body: bytes) -> dict[str, Any]:
    try:
        reasons = json.loads(body)["reasons"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return reasons if isinstance(reasons, dict) else {}


def _check_default(title: str, port: int) -> Finding:
    beside = port + SIDECAR_DISTANCE
    taken = [number for number in (port, beside) if why_not_listen("0.0.0.0", number)]
    if not taken:
        return ok("ports", f"{port} and {beside}, {title}'s server and sidecar, are free")
    seen = f"{', '.join(map(str, taken))} of {title}'s {port} and {beside} in use"
    remedy = "choose others with --port and --sidecar-port; `ss -ltnp` shows what uses them"
    return warning("ports", seen, remedy)


def _already_running(subject: Subject) -> Finding:
    if subject.command is None:
        return ok("ports", f"a balanced server runs on port {subject.port}")
    seen = f"a balanced server on port {subject.port} is running already"
    return error("ports", seen, "stop it or choose another --port")


def _check_port(host: str, port: int, who: str) -> Finding:
    reason = why_not_listen(host, port)
    if reason is None:
        return ok("ports", f"{port} is free for {who}")
    flag = "--port" if who == "the server" else "--sidecar-port"
    remedy = f"stop what uses it (`ss -ltnp` shows that), or choose another {flag}"
    return error("ports", f"{host}:{port}, needed for {who}, cannot be used ({reason})", remedy)


def _sidecar_port(subject: Subject) -> int:
    return subject.sidecar_port or (subject.port or 0) + SIDECAR_DISTANCE


def _get(url: str) -> "tuple[int, bytes] | str":
    """Status and body, or why there is none. Never through a proxy: this is the local machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_SECONDS) as response:
            return response.status, response.read(_MAX_BYTES)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read(_MAX_BYTES)
    except (OSError, ValueError) as reason:
        return f"no answer ({getattr(reason, 'reason', reason)})"
