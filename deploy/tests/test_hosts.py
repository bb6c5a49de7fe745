"""Groups of hosts: the leader serves, every host holds its ranks, and prefill feeds decode."""

import json
from pathlib import Path

import pytest
from commands import named, words
from manifests import DISAGGREGATED, MANY_HOSTS, OURS, Pod, balanced_pods, built, only, pods

LEADER = f"{OURS}-0.{OURS}.default"  # as the controller names it
GROUPS = [*MANY_HOSTS, *DISAGGREGATED]

every = pytest.mark.parametrize("path", GROUPS, ids=lambda path: path.name)


def leader(path: Path) -> Pod:
    return balanced_pods(path)[0]


def deployed(path: Path, name: str) -> list[str]:
    """Command line of the Deployment ``name``."""
    (pod,) = (pod for pod in pods(built(path)) if pod.owner == name)
    return words(pod, host=0)


@every
def test_ranks_are_those_of_all_hosts_and_no_host_holds_more_than_its_gpus(path: Path) -> None:
    size = only(built(path), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
    first_ranks = []
    for host in range(size):
        pod = balanced_pods(path)[min(host, 1)]
        limits = pod.container("engine")["resources"]["limits"]
        gpus = int(limits["nvidia.com/gpu"])
        line = words(pod, host)
        flags = named(line)
        if line[0] == "vllm":
            assert int(flags["data-parallel-size"]) == size * gpus
            assert int(flags["data-parallel-size-local"]) == gpus
            assert flags["data-parallel-address"] == LEADER
            assert ("headless" in flags) is (host > 0)
            first_ranks.append(int(flags.get("data-parallel-start-rank", 0)))
        else:
            assert int(flags["tp-size"]) == int(flags["ep-size"]) == size * gpus
            assert int(flags["nnodes"]) == size
            assert flags["dist-init-addr"].startswith(f"{LEADER}:")
            first_ranks.append(int(flags["node-rank"]) * gpus)
    assert first_ranks == [host * gpus for host in range(size)]


@every
def test_hosts_differ_only_in_their_place(path: Path) -> None:
    first, second = ({*words(pod, host)} for host, pod in enumerate(balanced_pods(path)))
    places = ("--headless", "--data-parallel-start-rank", "--node-rank")
    assert all(word.startswith(places) for word in first ^ second)
    one, other = (pod.spec | {"containers": []} for pod in balanced_pods(path))
    assert one == other


@every
def test_only_the_leader_is_asked_for_http(path: Path) -> None:
    engine, worker = (pod.container("engine") for pod in balanced_pods(path))
    for probe in ("startupProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": "http"}
        assert probe not in worker
    for name in ("ultraep-server", "ultraep-sidecar"):
        selector = only(built(path), "Service", name)["spec"]["selector"]
        assert [
            pod.role for pod in pods(built(path)) if selector.items() <= pod.labels.items()
        ] == ["leader"]


@every
def test_the_name_of_the_controllers_own_service_is_left_to_it(path: Path) -> None:
    services = [m["metadata"]["name"] for m in built(path) if m["kind"] == "Service"]
    assert OURS not in services


@pytest.mark.parametrize("path", DISAGGREGATED, ids=lambda path: path.name)
def test_prefill_sends_what_decode_receives(path: Path) -> None:
    line = words(leader(path), host=0)
    both = named(line), named(deployed(path, "decode"))
    if line[0] == "vllm":
        roles = [json.loads(flags["kv-transfer-config"]) for flags in both]
        assert [role["kv_role"] for role in roles] == ["kv_producer", "kv_consumer"]
        assert {role["kv_connector"] for role in roles} == {"NixlConnector"}
    else:
        assert [flags["disaggregation-mode"] for flags in both] == ["prefill", "decode"]
        assert {flags["disaggregation-transfer-backend"] for flags in both} == {"nixl"}


@pytest.mark.parametrize("path", DISAGGREGATED, ids=lambda path: path.name)
def test_the_router_knows_prefill_and_decode(path: Path) -> None:
    router = deployed(path, "router")
    flags = named(words(leader(path), host=0))
    assert f"http://{OURS}-0.{OURS}:{flags['port']}" in router
    (port,) = only(built(path), "Service", "decode")["spec"]["ports"]
    assert f"http://decode:{port['port']}" in router
    if "disaggregation-bootstrap-port" in flags:
        assert flags["disaggregation-bootstrap-port"] in router
