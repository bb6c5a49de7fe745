"""The commands in Compose and Kubernetes files are ones that this package takes."""

import argparse
from typing import Any

import pytest
from files import BIN, COMPOSE, DEPLOY, read_yaml, run
from test_kubernetes import OVERLAYS, built, container, deployment

from ultraep_serve.adapters.sglang import launch as sglang
from ultraep_serve.adapters.vllm import launch as vllm
from ultraep_serve.cli import serve
from ultraep_serve.sidecar.command import add_arguments

ENGINES: dict[str, Any] = {"vllm": vllm, "sglang": sglang}


def server_flags(words: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Ours and the engine's flags of a command that starts a server."""
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    ours, flags = parser.parse_known_args(words)
    return ours, ENGINES[words[0]].parse_engine_flags(flags)


def check_parallelism(engine: str, flags: argparse.Namespace) -> None:
    """Raises UnsupportedError where nothing could be balanced."""
    if engine == "vllm":
        vllm._check_parallelism(flags.tensor_parallel_size, flags.enable_expert_parallel)
    else:
        sglang._check_parallelism(flags)


def test_compose_starts_a_balanced_server_with_its_sidecar() -> None:
    ours, flags = server_flags(read_yaml(COMPOSE)["services"]["engine"]["command"])
    assert (ours.policy, ours.no_sidecar, ours.sidecar_host) == ("quota", False, "0.0.0.0")
    assert (ours.model, flags.host, flags.port) == ("/models/model", "0.0.0.0", 8000)
    check_parallelism("vllm", flags)
    targets = read_yaml(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    addresses = [target for job in targets for target in job["static_configs"][0]["targets"]]
    assert addresses == [f"engine:{flags.port + 1}", f"engine:{flags.port}"]


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_pods_start_a_balanced_server_and_a_sidecar_that_finds_it(path: Any) -> None:
    spec = deployment(built(path))["spec"]["template"]["spec"]
    words = container(spec, "engine")["args"]
    ours, flags = server_flags(words)
    assert (ours.no_sidecar, flags.host) == (True, "0.0.0.0")
    check_parallelism(words[0], flags)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sidecar = parser.parse_args(container(spec, "sidecar")["args"])
    user = spec["securityContext"]["runAsUser"]
    assert str(sidecar.run_dir) == f"/dev/shm/ultraep-{user}-{flags.port}"
    for name, port in (("engine", flags.port), ("sidecar", sidecar.port)):
        assert [entry["containerPort"] for entry in container(spec, name)["ports"]] == [port]


def test_flags_of_both_engines_are_offered() -> None:
    for engine in ENGINES:
        assert "--no-sidecar" in run(BIN / "ultraep-serve", engine, "--help")
