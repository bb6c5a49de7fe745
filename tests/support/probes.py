"""The probes of deploy/, asked of a server as the kubelet and Docker ask."""

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from ultraep_lab.demo.balanced_server import BalancedServer

_DEPLOY = Path(__file__).parents[2] / "deploy"


@dataclass(frozen=True)
class Probe:
    """A probe of a pod, with its manifest's numbers."""

    path: str
    port: str  # http or sidecar
    seconds: float  # within which an answer counts
    silence_seconds: float  # after which the kubelet acts

    def passes(self, server: BalancedServer) -> bool:
        """Whether ``server`` answers in time that all is well."""
        url = server.url if self.port == "http" else server.sidecar_url
        try:
            return httpx.get(f"{url}{self.path}", timeout=self.seconds).is_success
        except httpx.TransportError:
            return False


def probes() -> dict[str, Probe]:
    """The probes of the base, by name; what is left out is as Kubernetes fills it in."""
    manifest = yaml.safe_load((_DEPLOY / "kubernetes" / "base" / "deployment.yaml").read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return {
        name: Probe(
            **container[name]["httpGet"],
            seconds=container[name].get("timeoutSeconds", 1),
            silence_seconds=container[name].get("periodSeconds", 10)
            * container[name].get("failureThreshold", 3),
        )
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }


def image_environment(engine: str) -> dict[str, str]:
    """The variables that the image of ``engine`` sets for it."""
    ours = re.compile(rf"^ENV ({engine.upper()}_\w+)=(\S+)$", re.MULTILINE)
    return dict(ours.findall(_dockerfile(engine)))


def health_check(engine: str) -> Callable[[BalancedServer], bool]:
    """Whether a server passes the health check of the image of ``engine``, on its own ports."""
    text = _dockerfile(engine)
    (seconds,) = re.findall(r"^HEALTHCHECK .*--timeout=(\d+)s ", text, re.MULTILINE)
    (command,) = re.findall(r"^HEALTHCHECK .*\n +CMD (.+)$", text, re.MULTILINE)
    (exposed,) = re.findall(r"^EXPOSE (\d+) (\d+)$", text, re.MULTILINE)

    def passes(server: BalancedServer) -> bool:
        words = command
        for there, here in zip(exposed, (server.port, server.sidecar_port), strict=True):
            words = words.replace(f"'{there}/", f"'{here}/")
        try:
            return subprocess.run(json.loads(words), timeout=float(seconds)).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    return passes


def _dockerfile(engine: str) -> str:
    return (_DEPLOY / "docker" / f"{engine}-cpu.Dockerfile").read_text()
