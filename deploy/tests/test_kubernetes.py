"""Kubernetes manifests: built by kustomize, valid by their schemas, and as safe as they say."""

from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from files import BIN, DEPLOY, RULES, read_yaml, run

KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = [KUBERNETES / "base", *sorted((KUBERNETES / "overlays").iterdir())]
VERSIONS = ("1.29", "1.37")
OPERATOR = {"PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule}


@cache
def built(path: Path) -> list[dict[str, Any]]:
    """What kustomize makes of ``path``."""
    return list(yaml.safe_load_all(run(BIN / "kubectl", "kustomize", path)))


def deployment(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (manifest for manifest in manifests if manifest["kind"] == "Deployment")
    return found


def container(spec: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (entry for entry in spec["containers"] if entry["name"] == name)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_manifests_follow_their_schemas(path: Path, version: str) -> None:
    for manifest in built(path):
        if manifest["kind"] not in OPERATOR:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_is_noticed() -> None:
    manifest = yaml.safe_load(yaml.safe_dump(deployment(built(OVERLAYS[0]))))
    manifest["spec"]["template"]["spec"]["shareProcessNamespaces"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("kind", OPERATOR)
def test_the_operators_objects_follow_their_schemas(kind: str) -> None:
    manifests = built(KUBERNETES / "overlays" / "monitored")
    (manifest,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    model = OPERATOR[kind].model_validate(manifest)
    # Unknown fields are accepted and dropped, so nothing may be missing afterwards.
    assert model.model_dump(by_alias=True, exclude_unset=True, mode="json") == manifest


def test_the_operator_gets_the_same_rules() -> None:
    path = KUBERNETES / "components" / "prometheus-operator" / "prometheusrule.yaml"
    assert read_yaml(path)["spec"] == read_yaml(RULES)


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_names_lead_to_each_other(path: Path) -> None:
    manifests = built(path)
    pod = deployment(manifests)["spec"]["template"]
    labels = pod["metadata"]["labels"]
    ports = {port["name"] for entry in pod["spec"]["containers"] for port in entry["ports"]}
    for manifest in manifests:
        spec = manifest["spec"]
        if manifest["kind"] == "Service":
            assert spec["selector"].items() <= labels.items()
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if manifest["kind"] == "PodMonitor":
            assert spec["selector"]["matchLabels"].items() <= labels.items()
            assert {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]} <= ports
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for entry in pod["spec"]["containers"]:
        assert {mount["name"] for mount in entry["volumeMounts"]} <= volumes


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_pods_are_locked_down_and_share_memory(path: Path) -> None:
    spec = deployment(built(path))["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    for entry in spec["containers"]:
        locked = entry["securityContext"]
        assert locked["readOnlyRootFilesystem"]
        assert not locked["allowPrivilegeEscalation"]
        assert locked["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in entry["volumeMounts"]}
        assert mounts["/dev/shm"] == "shared-memory"
    (shared,) = (volume for volume in spec["volumes"] if volume["name"] == "shared-memory")
    assert shared["emptyDir"]["medium"] == "Memory"
    assert container(spec, "sidecar")["readinessProbe"]["httpGet"]["path"] == "/readyz"
