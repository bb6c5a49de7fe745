"""Kubernetes manifests as kustomize builds them, their schemas, and the pods in them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from files import BIN, DEPLOY, run

KUBERNETES = DEPLOY / "kubernetes"
ONE_HOST = [
    KUBERNETES / "base",
    *(KUBERNETES / "overlays" / name for name in ("gpus", "monitored", "replicas", "sglang")),
]
MANY_HOSTS = [
    KUBERNETES / "hosts",
    *(KUBERNETES / "overlays" / name for name in ("rack", "sglang-hosts")),
]
DISAGGREGATED = [KUBERNETES / "overlays" / name for name in ("sglang-prefill", "vllm-prefill")]
OURS = "ultraep"  # the object whose pods are balanced
VERSIONS = ("1.29", "1.37")
OPERATOR = {"PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule}
# LeaderWorkerSet's own schema comes with its controller and is in no package, so this one is ours.
GROUP_SCHEMA = json.loads((Path(__file__).parent / "leaderworkerset.schema.json").read_text())


@dataclass(frozen=True)
class Pod:
    """A pod template and the object that makes pods of it."""

    owner: str
    role: str  # leader or worker in a group of hosts, else empty
    labels: dict[str, str]  # those that its pods will have
    template: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.template["spec"]
        return found

    def container(self, name: str) -> dict[str, Any]:
        (found,) = (entry for entry in self.spec["containers"] if entry["name"] == name)
        return found


@cache
def built(path: Path) -> list[dict[str, Any]]:
    """What kustomize makes of ``path``."""
    return list(yaml.safe_load_all(run(BIN / "kubectl", "kustomize", path)))


def only(manifests: list[dict[str, Any]], kind: str, name: str = OURS) -> dict[str, Any]:
    """The one object of ``kind`` and ``name``."""
    (found,) = (
        manifest
        for manifest in manifests
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
    )
    return found


def pods(manifests: list[dict[str, Any]]) -> Iterator[Pod]:
    """Every pod template; those of groups with the labels that LeaderWorkerSet adds."""
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Deployment":
            template = manifest["spec"]["template"]
            yield Pod(name, "", template["metadata"]["labels"], template)
        elif manifest["kind"] == "LeaderWorkerSet":
            for index, role in enumerate(("leader", "worker")):
                template = manifest["spec"]["leaderWorkerTemplate"][f"{role}Template"]
                own = template["metadata"]["labels"]
                labels = {**own, "leaderworkerset.sigs.k8s.io/worker-index": str(index)}
                yield Pod(name, role, labels, template)


def validate(manifest: dict[str, Any], version: str) -> None:
    """Fail for whatever Kubernetes ``version``, or the object's own controller, would not know."""
    kind = manifest["kind"]
    if kind == "LeaderWorkerSet":
        jsonschema.validate(manifest, GROUP_SCHEMA)
        for pod in pods([manifest]):
            head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": pod.role}}
            validate({**head, "template": pod.template}, version)
    elif kind in OPERATOR:
        model = OPERATOR[kind].model_validate(manifest)
        # Unknown fields are accepted and dropped, so nothing may be missing afterwards.
        assert model.model_dump(by_alias=True, exclude_unset=True, mode="json") == manifest
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def balanced_pods(path: Path) -> list[Pod]:
    """The pods of ``path`` that ``ultraep-serve`` runs in."""
    return [pod for pod in pods(built(path)) if pod.owner == OURS]
