"""Kubernetes manifests: built by kustomize, valid by their schemas, and as safe as they say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from files import DEPLOY, RULES, read_yaml
from manifests import (
    DISAGGREGATED,
    KUBERNETES,
    MANY_HOSTS,
    ONE_HOST,
    VERSIONS,
    balanced_pods,
    built,
    pods,
    validate,
)

ALL = [*ONE_HOST, *MANY_HOSTS, *DISAGGREGATED]

every = pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)


def containers() -> Iterator[dict[str, Any]]:
    """Those of every pod."""
    for path in ALL:
        for pod in pods(built(path)):
            yield from pod.spec["containers"]


def test_no_overlay_is_forgotten() -> None:
    assert {path.name for path in ALL} == {
        "base",
        "hosts",
        *(path.name for path in (KUBERNETES / "overlays").iterdir()),
    }


@pytest.mark.parametrize("version", VERSIONS)
@every
def test_manifests_follow_their_schemas(path: Path, version: str) -> None:
    for manifest in built(path):
        validate(manifest, version)


def test_the_operator_gets_the_same_rules() -> None:
    path = KUBERNETES / "components" / "prometheus-operator" / "prometheusrule.yaml"
    assert read_yaml(path)["spec"] == read_yaml(RULES)


@every
def test_services_and_monitors_find_pods_and_ports(path: Path) -> None:
    manifests = built(path)
    for manifest in manifests:
        spec = manifest["spec"]
        if manifest["kind"] == "Service":
            selector, ports = spec["selector"], {port["targetPort"] for port in spec["ports"]}
        elif manifest["kind"] == "PodMonitor":
            selector = spec["selector"]["matchLabels"]
            ports = {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
        else:
            continue
        found = [pod for pod in pods(manifests) if selector.items() <= pod.labels.items()]
        assert found
        for pod in found:
            named = [port["name"] for entry in pod.spec["containers"] for port in entry["ports"]]
            assert ports <= set(named), (manifest["metadata"]["name"], pod.owner, pod.role)
        if manifest["kind"] == "PodMonitor":
            assert found == balanced_pods(path)


@every
def test_what_is_mounted_is_a_volume(path: Path) -> None:
    for pod in pods(built(path)):
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        for entry in pod.spec["containers"]:
            assert {mount["name"] for mount in entry["volumeMounts"]} <= volumes


@every
def test_pods_are_locked_down(path: Path) -> None:
    for pod in pods(built(path)):
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert not pod.spec["automountServiceAccountToken"]
        for entry in pod.spec["containers"]:
            locked = entry["securityContext"]
            assert locked["readOnlyRootFilesystem"]
            assert not locked["allowPrivilegeEscalation"]
            assert locked["capabilities"] == {"drop": ["ALL"]}


def test_probes_are_everywhere_as_in_the_base() -> None:
    """Which the tests of engines run against servers; loading may take longer than there."""
    (base,) = balanced_pods(KUBERNETES / "base")
    for entry in containers():
        for name in ("startupProbe", "livenessProbe"):
            first = base.container("engine")[name]
            failures = entry.get(name, first)["failureThreshold"]
            assert entry.get(name, first) == first | {"failureThreshold": failures}
            assert failures >= first["failureThreshold"]
        assert entry["readinessProbe"]["timeoutSeconds"] >= 10


def test_sglang_answers_health_without_a_prompt_of_its_own() -> None:
    """Our images set it; the engine's own image does not."""
    variable = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
    images = [path.read_text() for path in (DEPLOY / "docker").glob("sglang*.Dockerfile")]
    assert [f"\nENV {variable}=0\n" in text for text in images] == [True, True]
    plain = [entry for entry in containers() if entry["image"].startswith("lmsysorg/sglang:")]
    assert [{"name": variable, "value": "0"} in entry["env"] for entry in plain] == [True]


@every
def test_engines_share_memory_and_are_ready_when_their_ranks_are(path: Path) -> None:
    for pod in balanced_pods(path):
        for entry in pod.spec["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in entry["volumeMounts"]}
            assert mounts["/dev/shm"] == "shared-memory"
        (shared,) = (v for v in pod.spec["volumes"] if v["name"] == "shared-memory")
        assert shared["emptyDir"]["medium"] == "Memory"
        probe = pod.container("engine")["readinessProbe"]["httpGet"]
        assert (probe["path"], probe["port"]) == ("/readyz", "sidecar")
