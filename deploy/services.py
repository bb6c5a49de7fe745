"""Images run with podman as Compose and Kubernetes run them, and asked what users ask.

Their own user, a read-only root, no capabilities, no network but their own. Standard library only.
"""

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKEN = "0123456789abcdef" * 4
SECONDS = 900.0  # for a server to come up or to refuse
STOP_SECONDS = 60
PODMAN = ("podman", "--runtime", "runc")  # runc runs beside control groups of either version
# Podman asks for more open files and processes than a machine may permit.
LIMITS = ("--ulimit", "nofile=8192:8192", "--ulimit", "nproc=8192:8192")
CLOSED = (
    *("--read-only", "--cap-drop", "all"),
    *("--security-opt", "no-new-privileges", "--no-healthcheck"),  # asked here, without systemd
)
SERVERS = {  # words of a server, its port
    "vllm-cpu": (
        "vllm /models/model --port=8000 --tensor-parallel-size=2 --enable-expert-parallel "
        "--max-model-len=2048",
        8000,
    ),
    "sglang-cpu": ("sglang /models/model --tp-size=2 --ep-size=2 --context-length=2048", 30000),
}
CACHE = "/home/ultraep/.cache"  # a volume of its own, as in Compose
ALWAYS = "--served-model-name=model --host=0.0.0.0 --costs=/models/costs.json"
MODEL = """
from dataclasses import asdict
from pathlib import Path
from ultraep_serve.costs.model import CostModel
from ultraep_lab.demo.models import make_model
from ultraep_lab.demo.spec import ModelSpec
spec = ModelSpec(hidden_size=128, num_layers=3, num_experts=8, experts_per_token=2,
                 moe_intermediate_size=64, num_heads=4, head_dim=32)
make_model(Path("/models/model"), spec)
always = CostModel(seconds_per_assignment=1e-3, bytes_per_expert=1, link_bytes_per_second=1e12)
Path("/models/costs.json").write_text(always.to_json())
"""
ASK = """
import json, sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen
url, body, token = sys.argv[1:]
head = {"Content-Type": "application/json"}
if token:
    head["Authorization"] = "Bearer " + token
try:
    answer = urlopen(Request(url, body.encode() or None, head), timeout=100)
except HTTPError as error:
    answer = error
print(json.dumps([answer.status, answer.read().decode()]))
"""
DESCRIBE = (
    "import json; from ultraep_serve.system.machine import describe; print(json.dumps(describe()))"
)


@dataclass
class Row:
    """One thing that was looked at."""

    what: str
    is_right: bool
    saw: str


@dataclass
class Run:
    """One way in which an image was run."""

    image: str
    how: str
    checks: list[Row] = field(default_factory=list)

    def see(self, what: str, is_right: bool, saw: object) -> None:
        """Note what was seen."""
        text = " ".join(str(saw).split())[:300]
        self.checks.append(Row(what, is_right, text))
        print(
            f"{self.image}, {self.how}: {what}: {'' if is_right else 'WRONG: '}{text}", flush=True
        )


@dataclass(frozen=True)
class Container:
    """A container that podman runs."""

    name: str

    def does(self, *command: str) -> subprocess.CompletedProcess[str]:
        """What ``command`` says in it."""
        return _podman("exec", self.name, *command)

    def ask(self, port: int, path: str, body: Any = None, token: str = "") -> tuple[int, str]:
        """Status and text of an answer; status 0 where there is none."""
        text = "" if body is None else json.dumps(body)
        url = f"http://127.0.0.1:{port}{path}"
        done = self.does("python", "-S", "-c", ASK, url, text, token)
        if done.returncode:
            return 0, (done.stderr.strip().splitlines() or [""])[-1]
        status, answer = json.loads(done.stdout)
        return status, answer

    def state(self, field_name: str) -> str:
        """What podman knows of it."""
        return _podman(
            "inspect", "--format", f"{{{{.State.{field_name}}}}}", self.name
        ).stdout.strip()

    def log(self) -> str:
        """All that it has said."""
        done = _podman("logs", self.name)
        return done.stdout + done.stderr

    def comes_up(self, port: int, path: str) -> bool:
        """Wait until it answers, or has ended."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self.state("Running") == "true":
            if self.ask(port, path)[0] == 200:
                return True
            time.sleep(2)
        return False

    def stop(self) -> tuple[int, float]:
        """Exit status after SIGTERM, 137 where it had to be killed, and seconds."""
        began = time.monotonic()
        _podman("stop", "--time", str(STOP_SECONDS), self.name)
        return int(self.state("ExitCode")), time.monotonic() - began


@contextmanager
def container(image: str, words: str, *options: str) -> Iterator[Container]:
    """``image`` with the arguments ``words``; removed at the end."""
    name = f"ultraep-check-{os.getpid()}-{time.monotonic_ns()}"
    where = ("--name", name, "--network", "none")
    command = ["run", "--detach", *where, *LIMITS, *CLOSED, *options]
    done = _podman(*command, f"ultraep-serve:{image}", *shlex.split(words))
    try:
        if done.returncode:
            raise SystemExit(f"podman {shlex.join(command)}: {done.stderr}")
        yield Container(name)
    finally:
        _podman("rm", "--force", "--volumes", "--time", "5", name)


def run_images(names: Sequence[str], folder: Path) -> list[Run]:
    """Run those of ``names`` that can run here; a model for them is made in ``folder``."""
    runs: list[Run] = []
    models = folder / "models"
    engines = [name for name in names if name in SERVERS]
    if engines:
        _make_model(engines[0], models)
    for name in engines:
        runs.append(_server(name, models))
    runs += [_on_gpus(name) for name in names if name in ("vllm", "sglang")]
    return runs


def machine(image: str) -> dict[str, Any]:
    """What this machine is, as the package in ``image`` says."""
    said = _alone(image, "python3", "-c", DESCRIBE)
    if said.returncode:
        raise SystemExit(f"{image} does not run: {said.stderr.strip()}")
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def _make_model(image: str, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)  # for the image's user
    print("making a model", flush=True)
    volume = f"--volume={folder}:/models"
    made = _alone(image, "python", "-c", MODEL, options=(volume, "--volume", CACHE))
    if made.returncode:
        raise SystemExit(f"no model could be made: {made.stdout}{made.stderr}")


def _server(name: str, models: Path) -> Run:
    run = Run(name, "1 GB of /dev/shm")
    words, port = SERVERS[name]
    line = f"{words} {ALWAYS} --sidecar-host=0.0.0.0"
    with container(name, line, *_for_engine(models)) as made:
        if _comes_up(run, made, port, "/health"):
            _is_confined(run, made)
            _serves(run, made, port)
            _has_sidecar(run, made, port)
            _health_check(run, made)
            _stops(run, made)
    return run


def _on_gpus(name: str) -> Run:
    """Its own layer alone: what it finds of the engine, and its user."""
    run = Run(name, "its own layer")
    done = _alone(name, "ultraep-serve", "--version")
    run.see(
        "knows the engine",
        "verified" in done.stdout and "not verified" not in done.stdout,
        done.stdout + done.stderr,
    )
    done = _alone(name, "id", "-u")
    run.see("its user is nobody special", done.stdout.strip() == "10001", done.stdout)
    return run


def _comes_up(run: Run, made: Container, port: int, path: str) -> bool:
    """Whether it does; where not, all that it has said is printed."""
    began = time.monotonic()
    is_up = made.comes_up(port, path)
    if not is_up:
        print(made.log())
    run.see(f"{path} comes up", is_up, f"after {time.monotonic() - began:.0f} s")
    return is_up


def _is_confined(run: Run, made: Container) -> None:
    user = made.does("id", "-u").stdout.strip()
    run.see("its user is nobody special", user == "10001", user)
    done = made.does("touch", "/home/ultraep/file")  # its own, but for the root
    run.see("its root is read-only", "Read-only" in done.stderr, done.stderr)


def _serves(run: Run, made: Container, port: int) -> None:
    body = {"model": "model", "prompt": "law court judge " * 200, "max_tokens": 4}
    status, text = made.ask(port, "/v1/completions", body)
    answer = json.loads(text)["choices"][0]["text"] if status == 200 else text
    run.see("answers a prompt", status == 200 and bool(answer.strip()), answer)


def _has_sidecar(run: Run, made: Container, server_port: int) -> None:
    """Readiness, page, metrics, balance, and who may set a policy."""
    port = server_port + 700
    status, text = _until(lambda: _good(made.ask(port, "/readyz"))) or made.ask(port, "/readyz")
    run.see("/readyz", status == 200, text)
    status, text = made.ask(port, "/")
    run.see("page", status == 200 and "<html" in text, f"{len(text)} characters of HTML")
    status, text = made.ask(port, "/metrics")
    lines = re.findall(r"^ultraep_rank_up\b.* 1\.0$", text, re.MULTILINE)
    run.see("metrics", len(lines) == 2, f"{len(lines)} ranks are up")
    _serves(run, made, server_port)
    balance = _until(lambda: _imbalance(made, port))
    run.see("balances", balance is not None and balance[1] < min(1.1, balance[0]), balance)
    status, text = made.ask(port, "/v1/control/policy", {"policy": "off"})
    run.see("no policy without the token", status == 401, f"{status} {text}")
    status, text = made.ask(port, "/v1/control/policy", {"policy": "off"}, TOKEN)
    run.see("policy off", status == 200, f"{status} {text}")


def _good(answer: tuple[int, str]) -> tuple[int, str] | None:
    return answer if answer[0] == 200 else None


def _imbalance(made: Container, port: int) -> tuple[float, float] | None:
    status, text = made.ask(port, "/v1/balance?policy=quota")
    found = json.loads(text).get("imbalance") if status == 200 else None
    if not found or not found["before"]:
        return None
    return round(found["before"]["mean"], 3), round(found["after"]["mean"], 3)


def _health_check(run: Run, made: Container) -> None:
    """The command that is in the image."""
    image = _podman("inspect", "--format", "{{.ImageName}}", made.name).stdout.strip()
    listed = _podman("image", "inspect", "--format", "{{json .HealthCheck.Test}}", image).stdout
    done = made.does(*json.loads(listed)[1:])
    run.see("its health check", done.returncode == 0, done.stderr or "passes")


def _stops(run: Run, made: Container) -> None:
    status, seconds = made.stop()
    run.see("SIGTERM ends it", status in (0, 143), f"exit status {status} after {seconds:.1f} s")


def _for_engine(models: Path) -> list[str]:
    return [
        *("--shm-size", "1g", "--volume", CACHE),
        *("--volume", f"{models}:/models:ro", "--env", f"ULTRAEP_CONTROL_TOKEN={TOKEN}"),
        *("--env", "HF_HUB_OFFLINE=1"),
    ]


def _until(found: Any, seconds: float = 30.0) -> Any:
    """The first true answer of ``found`` within ``seconds``, else its last one."""
    deadline = time.monotonic() + seconds
    while not (answer := found()) and time.monotonic() < deadline:
        time.sleep(1)
    return answer


def _alone(
    image: str, *command: str, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """What ``command`` says in a container of its own."""
    flags = ("--rm", "--network", "none", *LIMITS, *CLOSED, *options, "--entrypoint", command[0])
    return _podman("run", *flags, f"ultraep-serve:{image}", *command[1:])


def _podman(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PODMAN, *words], capture_output=True, text=True, check=False)
