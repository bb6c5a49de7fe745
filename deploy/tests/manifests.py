"""Kubernetes manifests as kustomize builds them, and the pods in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
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


def balanced_pods(path: Path) -> list[Pod]:
    """The pods of ``path`` that ``ultraep-serve`` runs in."""
    return [pod for pod in pods(built(path)) if pod.owner == OURS]
