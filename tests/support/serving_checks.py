"""What the tests of both engines' servers have in common."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.namespaces import Hosts, on_host
from tests.support.waiting import until
from ultraep_lab.bench.greedy_tokens import generate
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.balanced_server import (
    BalancedServer,
    check_tokens,
    expert_parallel_flags,
    generate_under,
    mixed_prompts,
)
from ultraep_lab.errors import BenchError
from ultraep_serve.costs.model import CostModel
from ultraep_serve.telemetry import run_directory
from ultraep_serve.types import Policy

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


CONTEXT = 4096
HOSTS_TIMEOUT = 10
PROMPTS = mixed_prompts(16)
# The models are so small that copying an expert may take longer than computing it.
MOVING_ALWAYS_PAYS = CostModel(
    seconds_per_assignment=1e-3, bytes_per_expert=1, link_bytes_per_second=1e12
)


def served(
    engine: str, model: Path, directory: Path, mode: str, dtype: str, *extra: str
) -> BalancedServer:
    """A server on two ranks that balances whatever its weights cost to move."""
    costs = directory / "costs.json"
    costs.write_text(MOVING_ALWAYS_PAYS.to_json())
    flags = [*expert_parallel_flags(mode, dtype, CONTEXT, engine), "--costs", str(costs), *extra]
    return BalancedServer(model, flags, directory / "server.log", engine=engine)


def run_paths(server: BalancedServer) -> list[Path]:
    """The run directories of ``server``, which may have ended."""
    mine = f"ultraep-{os.getuid()}-p{server.process_id}-*"
    return list(run_directory.SHARED_MEMORY.glob(mine))


def balance(server: BalancedServer) -> dict[str, Any]:
    """What the sidecar says of all batches under quota."""
    with closing(Sidecar(server.sidecar_url, server.token)) as sidecar:
        return sidecar.balance(0, Policy.QUOTA)


def check_balanced(server: BalancedServer, num_layers: int) -> None:
    """Tokens stay the same, and every MoE layer was balanced meanwhile."""
    check = check_tokens(server, PROMPTS)
    assert check.same == check.prompts == len(PROMPTS)
    # One text alone is skewed, whichever domains the engine's steps put together above.
    generate_under(server, Policy.QUOTA, [max(PROMPTS, key=len)], max_tokens=1)
    summary = balance(server)
    assert [layer["layer"] for layer in summary["layers"]] == list(range(num_layers))
    for layer in summary["layers"]:
        assert layer["imbalance"]["before"]["max"] > 1.3
        assert layer["imbalance"]["after"]["max"] <= 1.02
    assert summary["bytes_moved"] > 0
    assert summary["batches"]["skipped"]["inconsistent"] == 0
    assert "ultraep: loading has ended" in server.log_path.read_text(errors="replace")


def check_probes(server: BalancedServer, engine: str) -> None:
    """It passes every probe when idle and in prefills, and lives while its ranks answer nothing.

    As they do in a batch of a minute, which stopped ranks stand for.
    """
    asked, is_healthy = probes(), health_check(engine)
    prompts = mixed_prompts(32, longest=CONTEXT - 500)
    assert asked["livenessProbe"].silence_seconds >= 60

    def failed(*names: str) -> list[str]:
        return [name for name in names if not asked[name].passes(server)]

    assert failed(*asked) == []
    assert is_healthy(server)
    with ThreadPoolExecutor(1) as pool:
        prefills = pool.submit(generate, server.url, server.model, prompts, 1, concurrency=8)
        while not prefills.done():
            assert failed(*asked) == []
            assert is_healthy(server)
        prefills.result()
        ranks = [rank["pid"] for rank in balance(server)["ranks"]]
        try:
            for rank in ranks:
                os.kill(rank, signal.SIGSTOP)
            waiting = pool.submit(generate, server.url, server.model, prompts[:1], 1, concurrency=1)
            for _ in range(3):
                assert failed("startupProbe", "livenessProbe") == []
                time.sleep(0.2)
            assert not waiting.done()
        finally:
            for rank in ranks:
                os.kill(rank, signal.SIGCONT)
        waiting.result()
    until(lambda: failed("readinessProbe") == [])


def check_killed_rank(server: BalancedServer) -> None:
    """It ends the server, whose sidecar says so before, and nothing is left."""
    assert httpx.get(f"{server.sidecar_url}/readyz").status_code == 200
    os.kill(balance(server)["ranks"][1]["pid"], signal.SIGKILL)
    until(lambda: _readiness(server) != 200, 30.0)
    server.wait(180.0)  # vLLM's status is 0 where its engine died after the start
    check_nothing_left(server)


def check_without_files(server: BalancedServer) -> None:
    """It serves on, and says so, when a start script deletes all files in shared memory."""
    (run_path,) = run_paths(server)
    for path in run_path.iterdir():
        path.unlink()
    assert _readiness(server) == 503
    generate(server.url, server.model, PROMPTS[:1], 4, concurrency=1)


def check_end(server: BalancedServer) -> None:
    """It ends when it is asked to, and nothing is left."""
    os.kill(server.process_id, signal.SIGTERM)
    server.wait(60.0)
    check_nothing_left(server)


def check_nothing_left(server: BalancedServer) -> None:
    """No run directory and no sidecar of a server that has ended."""
    until(lambda: not run_paths(server), 30.0)
    until(lambda: _readiness(server) == 0)


def _readiness(server: BalancedServer) -> int:
    """The status of /readyz; 0 where there is no sidecar."""
    try:
        return httpx.get(f"{server.sidecar_url}/readyz").status_code
    except httpx.TransportError:
        return 0


class HostServer(BalancedServer):
    """One of two hosts, in namespaces of its own."""

    token = "t" * 43
    hosts: Hosts
    host: int

    @property
    def address(self) -> str:
        """Its address on the link."""
        return self.hosts.addresses[self.host]

    def _environment(self) -> dict[str, str]:
        own = {"VLLM_HOST_IP": self.address, "SGLANG_HOST_IP": self.address}
        own["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; both would take half of the memory that is free
        gloo = {"GLOO_SOCKET_IFNAME": self.hosts.link, "ULTRAEP_CONTROL_TOKEN": self.token}
        return {**os.environ, **own, **gloo}

    def _command(self) -> list[str]:
        command = [*super()._command(), "--sidecar-host", self.address]
        return self.hosts.command(self.host, command)


@contextmanager
def two_hosts(
    engine: str,
    model: Path,
    directory: Path,
    hosts: Hosts,
    shared: list[str],
    second_flags: list[str],
) -> Iterator[tuple[HostServer, HostServer]]:
    """A launcher for each of two hosts; the first one serves. Inside, the network is its own."""
    costs = directory / "costs.json"
    costs.write_text(MOVING_ALWAYS_PAYS.to_json())
    flags = [*shared, "--costs", str(costs), "--timeout-seconds", str(HOSTS_TIMEOUT)]
    second = HostServer(
        model, [*flags, *second_flags], directory / "second.log", engine=engine, serves=False
    )
    first = HostServer(model, flags, directory / "first.log", engine=engine)
    for host, server in enumerate((first, second)):
        server.hosts, server.host = hosts, host
        server.sidecar_url = f"http://{server.address}:{server.sidecar_port}"
    with on_host(hosts, 0), second, first:
        yield first, second


def check_cut(first: HostServer, second: HostServer) -> None:
    """With the link cut, /readyz says so on both hosts, and both end with an error that does.

    Before, the second host's sidecar is asked over the link; then from where it runs.
    """
    request = threading.Thread(target=_try_to_generate, args=(first,), daemon=True)
    request.start()  # so that ranks wait for each other in the engine's own collectives
    time.sleep(0.5)
    first.hosts.cut()
    cut = time.monotonic()
    for server, other in ((first, second), (second, first)):
        with on_host(server.hosts, server.host):
            while (answer := httpx.get(f"{server.sidecar_url}/readyz")).status_code == 200:
                assert time.monotonic() - cut < 10
                time.sleep(0.2)
        assert f"host {other.hosts.names[other.host]} (ranks " in answer.text
    for server in (first, second):
        server.wait(cut + HOSTS_TIMEOUT + 15 - time.monotonic())
        log = server.log_path.read_text(errors="replace")
        assert "restart the engine on all hosts" in log, log[-4000:]
    request.join()


def _try_to_generate(server: BalancedServer) -> None:
    with suppress(BenchError, httpx.HTTPError):
        generate_under(server, Policy.QUOTA, PROMPTS)


def check_two_hosts(first: BalancedServer, second: BalancedServer, num_layers: int) -> None:
    """Tokens stay the same; both sidecars show the same balance, near its floor, and are ready."""
    for host in (first, second):
        assert httpx.get(f"{host.sidecar_url}/readyz").status_code == 200
    check = check_tokens(first, PROMPTS, concurrency=len(PROMPTS))  # fewer steps: they are slow
    assert check.same == check.prompts == len(PROMPTS)
    seen = [balance(host) for host in (first, second)]
    assert [[rank["rank"] for rank in one["ranks"]] for one in seen] == [[0, 1], [2, 3]]
    assert seen[0]["imbalance"] == seen[1]["imbalance"]
    for one in seen:
        assert (one["num_ranks"], len(one["layers"])) == (4, num_layers)
        assert one["batches"]["skipped"]["inconsistent"] == 0
        assert one["imbalance"]["before"]["mean"] > one["floor"] * 1.05
        assert 1.0 < one["floor"] <= one["imbalance"]["after"]["mean"] < one["floor"] * 1.03
        assert one["bytes_moved"] > 0
