"""The commands in Compose and Kubernetes files are ones that this package and the engines take."""

import argparse
import json
import sys
from pathlib import Path

import pytest
from commands import (
    ENGINES,
    INTERPRETERS,
    accepts,
    check_parallelism,
    our_flags,
    read_flags,
    words,
)
from files import COMPOSE, DEPLOY, read_yaml, run
from manifests import DISAGGREGATED, MANY_HOSTS, ONE_HOST, balanced_pods, built, pods

from ultraep_serve.config import SIDECAR_DISTANCE, BalanceConfig
from ultraep_serve.types import Policy

SERVER = {"vllm": ["vllm", "serve"], "sglang": ["python3", "-m", "sglang.launch_server"]}


def server_flags(line: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Ours and the engine's flags of a command that starts a server."""
    ours, flags = our_flags(line)
    return ours, read_flags(line[0], flags)


def check_balanced(ours: argparse.Namespace) -> None:
    config = BalanceConfig.from_flags(ours)
    assert (config.policy, ours.no_sidecar, ours.sidecar_host) == (Policy.QUOTA, False, "0.0.0.0")


def engine_lines(engine: str) -> list[list[str]]:
    """What the server of ``engine`` itself is given in every manifest that starts it."""
    lines = []
    for path in [*ONE_HOST, *MANY_HOSTS, *DISAGGREGATED]:
        for pod in pods(built(path)):
            line = words(pod, host=int(pod.role == "worker"))
            if line[0] == engine and line[:2] != SERVER["vllm"]:
                lines.append(["--model", *our_flags(line)[1]])
            elif line[: len(SERVER[engine])] == SERVER[engine]:
                lines.append(line[len(SERVER[engine]) :])
    return lines


def test_compose_starts_a_balanced_server_with_its_sidecar() -> None:
    ours, flags = server_flags(read_yaml(COMPOSE)["services"]["engine"]["command"])
    check_balanced(ours)
    assert (flags.model, flags.host, flags.port) == ("/models/model", "0.0.0.0", 8000)
    check_parallelism("vllm", flags)
    targets = read_yaml(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    addresses = [target for job in targets for target in job["static_configs"][0]["targets"]]
    assert addresses == [f"engine:{flags.port + SIDECAR_DISTANCE}", f"engine:{flags.port}"]


def test_a_node_with_gpus_has_one_for_each_rank() -> None:
    (path,) = (path for path in ONE_HOST if path.name == "gpus")
    (pod,) = balanced_pods(path)
    _, flags = server_flags(words(pod, host=0))
    resources = pod.container("engine")["resources"]
    asked = {resources[kind]["nvidia.com/gpu"] for kind in ("requests", "limits")}
    assert asked == {str(flags.tensor_parallel_size)} == {"8"}
    assert pod.container("engine")["image"] == "ultraep-serve:vllm"


@pytest.mark.parametrize(
    "path", [*ONE_HOST, *MANY_HOSTS, *DISAGGREGATED], ids=lambda path: path.name
)
def test_every_host_starts_a_balanced_server_with_its_sidecar(path: Path) -> None:
    for host, pod in enumerate(balanced_pods(path)):
        ours, flags = server_flags(line := words(pod, host))
        check_balanced(ours)
        assert flags.host == "0.0.0.0"
        check_parallelism(line[0], flags)
        ports = {port["name"]: port["containerPort"] for port in pod.container("engine")["ports"]}
        served = {} if pod.role == "worker" else {"http": flags.port}
        assert ports == {**served, "sidecar": flags.port + SIDECAR_DISTANCE}


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_take_their_flags(engine: str) -> None:
    interpreter, lines = INTERPRETERS[engine], engine_lines(engine)
    assert len(lines) >= 4
    if not interpreter.exists():
        pytest.skip(f"{interpreter} is missing: `make setup-{engine}`")
    done = accepts(engine, lines)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DISAGGREGATED, ids=lambda path: path.name)
def test_routers_take_their_flags(path: Path) -> None:
    (pod,) = (pod for pod in pods(built(path)) if pod.owner == "router")
    line = words(pod, host=0)
    flags = line[next(index for index, word in enumerate(line) if word.startswith("--")) :]
    package = "vllm_router" if line[0] == "vllm-router" else "sglang_router"
    code = (
        f"import json, sys; from {package}.launch_router import parse_router_args;"
        "router = parse_router_args(sys.argv[1:]);"
        "print(json.dumps([router.prefill_urls, router.decode_urls, router.port]))"
    )
    (prefill,), (decode,), port = json.loads(run(sys.executable, "-c", code, *flags))
    bootstrap = None if package == "vllm_router" else 8998
    assert prefill == ["http://ultraep-0.ultraep:8000", bootstrap]
    assert decode == "http://decode:8000"
    assert [entry["containerPort"] for entry in pod.container("router")["ports"]] == [port]
