"""Runs without an engine, their sidecars, and a real Prometheus server that scrapes them."""

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from files import DEPLOY, RULES, read_yaml

from ultraep_lab.this_machine import free_port

SECONDS = 120.0  # for anything to come up
HOSTS = ("127.0.0.1", "localhost")  # two names of the sidecar stand for two hosts of one server


@dataclass(frozen=True)
class Live:
    """What answers, and the process that stands for the engine."""

    url: str
    engine: "subprocess.Popen[bytes]"
    run_path: Path

    def get(self, path: str, **parameters: object) -> Any:
        """Data of an API answer; an error of Prometheus fails the test with its message."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Series of ``expression`` once there are any."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = self.get("query", query=expression)["result"]
            return bool(found)

        until(look, expression)
        return found

    def wait_until_scraped(self) -> None:
        """Return once some scrapes of each host have come in."""
        until(lambda: answers(f"{self.url}/-/ready"), "Prometheus")
        for host in HOSTS:
            self.wait_for(f'count_over_time(ultraep_ready{{instance=~"{host}:.+"}}[1m]) > 3')


def until(is_so: Callable[[], bool], what: str) -> None:
    """Return once ``is_so``; fail after some seconds."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS} s"
        time.sleep(0.1)


@contextmanager
def live(tmp_path: Path) -> Iterator[Live]:
    """Start everything, wait until two scrapes have come in, stop everything."""
    run_path = tmp_path / "run"
    sidecar_port, port = free_port(), free_port()
    with ExitStack() as stack:
        rings = process(sys.executable, "-m", "tests.support.rings", run_path)
        engine = stack.enter_context(rings)
        until(lambda: (run_path / "ring-3").exists(), "rings")
        sidecar = [sys.executable, "-m", "ultraep_serve.sidecar", "--run-dir", run_path]
        stack.enter_context(process(*sidecar, f"--port={sidecar_port}"))
        stack.enter_context(process(*server_command(tmp_path, port, sidecar_port)))
        started = Live(f"http://127.0.0.1:{port}", engine, run_path)
        started.wait_until_scraped()
        yield started


def server_command(tmp_path: Path, port: int, sidecar_port: int) -> list[str]:
    """Prometheus with the configuration that is shipped, other addresses and a faster clock."""
    config = read_yaml(DEPLOY / "prometheus" / "prometheus.yml")
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "ultraep")
    (entry,) = job["static_configs"]
    entry["targets"] = [f"{host}:{sidecar_port}" for host in HOSTS]
    config["scrape_configs"] = [job]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    program = shutil.which("prometheus")
    assert program, "install prometheus (Debian: apt-get install prometheus)"
    return [
        program,
        f"--config.file={path}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]


@contextmanager
def process(*command: str | Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A child that is gone afterwards."""
    child = subprocess.Popen([str(word) for word in command])
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
