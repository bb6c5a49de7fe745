"""Kubernetes manifests: built by kustomize, valid by their schemas, and as safe as they say."""

from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from files import RULES, read_yaml
from manifests import (
    DISAGGREGATED,
    KUBERNETES,
    MANY_HOSTS,
    ONE_HOST,
    OPERATOR,
    VERSIONS,
    balanced_pods,
    built,
    only,
    pods,
    validate,
)

ALL = [*ONE_HOST, *MANY_HOSTS, *DISAGGREGATED]

every = pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)


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


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet"])
def test_a_misspelt_field_of_a_pod_is_noticed(kind: str) -> None:
    path = ONE_HOST[0] if kind == "Deployment" else MANY_HOSTS[0]
    manifest = yaml.safe_load(yaml.safe_dump(only(built(path), kind)))
    *_, pod = pods([manifest])
    pod.spec["shareProcessNamespaces"] = True
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        validate(manifest, VERSIONS[-1])


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("spec", "replica", 2),
        ("spec", "startupPolicy", "LeaderFirst"),
        ("leaderWorkerTemplate", "size", 0),
        ("leaderWorkerTemplate", "restartPolicy", "Always"),
    ],
)
def test_a_mistake_in_a_group_is_noticed(place: str, name: str, value: object) -> None:
    manifest = yaml.safe_load(yaml.safe_dump(only(built(MANY_HOSTS[0]), "LeaderWorkerSet")))
    spec = manifest["spec"]
    (spec if place == "spec" else spec[place])[name] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest, VERSIONS[-1])


@pytest.mark.parametrize("kind", OPERATOR)
def test_the_operators_objects_follow_their_schemas(kind: str) -> None:
    validate(only(built(KUBERNETES / "overlays" / "monitored"), kind), VERSIONS[-1])


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
