"""The Helm chart, rendered by Helm's own library: the same objects as kustomize makes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from files import DEPLOY, RULES, dashboard, read_yaml
from manifests import MANY_HOSTS, ONE_HOST, OURS, VERSIONS, built, only, pods, validate

from ultraep_serve import __version__

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this machine")

CHART = DEPLOY / "helm" / "ultraep-serve"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CPU = read_yaml(CHART / "cpu.yaml")
OPERATOR = {"podMonitor": True, "rules": True}
CLIQUE = "nvidia.com/gpu.clique"
LABELS = ("name", "instance", "part-of", "version", "managed-by")
# The values that make of the chart what each folder of deploy/kubernetes is.
SAME_AS = {
    "base": CPU,
    "gpus": {},
    "sglang": {**CPU, "engine": "sglang"},
    "replicas": {**CPU, "replicas": 3},
    "monitored": {**CPU, "monitoring": OPERATOR},
    "hosts": {"hosts": 2},
    "sglang-hosts": {"hosts": 2, "engine": "sglang"},
    "rack": {"hosts": 2, "exclusiveTopology": CLIQUE, "monitoring": OPERATOR},
}
EVERYTHING: dict[str, Any] = {
    "image": {"pullSecrets": ["registry"], "tag": "mine", "pullPolicy": "Always"},
    "flags": ["--slots=4"],
    "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "extraResources": {"rdma/ib": 1},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "monitoring": {
        **OPERATOR,
        "dashboard": True,
        "labels": {"release": "prometheus"},
        "documentation": "https://docs.our.net/ultraep",
    },
}


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


def rendered(chart: Any, values: dict[str, Any], release: str = OURS) -> list[dict[str, Any]]:
    """What ``helm install`` would apply."""
    chart.validate_schema(values)
    texts = chart.render(values, name=release, namespace="default")
    files = (text for path, text in texts.items() if path.endswith(".yaml"))
    return [document for text in files for document in yaml.safe_load_all(text) if document]


def plain(part: Any) -> Any:
    """Without the labels that tell releases apart, and what Kubernetes would fill in."""
    if isinstance(part, list):
        return [plain(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    left_out = {f"app.kubernetes.io/{name}" for name in LABELS[1:]}
    left_out |= {"helm.sh/chart", "imagePullPolicy"}
    return {key: plain(value) for key, value in part.items() if key not in left_out}


def by_name(manifests: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    return {(entry["kind"], entry["metadata"]["name"]): plain(entry) for entry in manifests}


@pytest.mark.parametrize("path", [*ONE_HOST, *MANY_HOSTS], ids=lambda path: path.name)
def test_the_chart_makes_what_kustomize_makes(chart: Any, path: Path) -> None:
    found, expected = by_name(rendered(chart, SAME_AS[path.name])), by_name(built(path))
    assert found.keys() == expected.keys()
    for name, manifest in expected.items():
        assert found[name] == manifest


@pytest.mark.parametrize("values", [{}, {"hosts": 2}], ids=["one host", "hosts"])
def test_everything_that_can_be_set_gives_valid_objects(chart: Any, values: dict[str, Any]) -> None:
    for version in VERSIONS:
        for manifest in rendered(chart, EVERYTHING | values):
            validate(manifest, version)


@pytest.mark.parametrize("values", [{}, {"hosts": 2}], ids=["one host", "hosts"])
def test_what_is_set_reaches_the_pods(chart: Any, values: dict[str, Any]) -> None:
    for pod in pods(rendered(chart, EVERYTHING | values)):
        engine = pod.container("engine")
        assert (engine["image"], engine["imagePullPolicy"]) == ("ultraep-serve:mine", "Always")
        assert engine["args"][-1] == "--slots=4"
        assert {engine["resources"][kind]["rdma/ib"] for kind in ("requests", "limits")} == {"1"}
        assert pod.spec["imagePullSecrets"] == [{"name": "registry"}]
        assert pod.spec["nodeSelector"] == EVERYTHING["nodeSelector"]
        assert pod.spec["tolerations"] == EVERYTHING["tolerations"]
        for container in pod.spec["containers"]:
            assert EVERYTHING["env"][0] in container["env"]


def test_flags_of_another_way_to_spread_ranks_take_the_place_of_the_charts(chart: Any) -> None:
    flags = ["--data-parallel-size=8", "--enable-expert-parallel"]
    (pod,) = pods(rendered(chart, {"parallelFlags": flags}))
    line = pod.container("engine")["args"]
    assert line[-3:] == [*flags, "--sidecar-host=0.0.0.0"]
    assert not any(word.startswith("--tensor-parallel-size") for word in line)


def test_the_dashboard_and_the_rules_are_those_of_deploy(chart: Any) -> None:
    everything = rendered(chart, EVERYTHING)
    data = only(everything, "ConfigMap", f"{OURS}-dashboard")["data"]
    assert json.loads(data["ultraep.json"]) == dashboard()
    rule = only(everything, "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    there = RULES.read_text().replace(
        "https://docs.example.com/ultraep-serve", "https://docs.our.net/ultraep"
    )
    assert rule["spec"] == yaml.safe_load(there)


def test_two_releases_in_a_namespace_have_nothing_in_common(chart: Any) -> None:
    one, other = (rendered(chart, EVERYTHING, release) for release in ("one", "other"))
    assert not by_name(one).keys() & by_name(other).keys()
    labels = [pod.labels for pod in pods(other)]
    for manifest in one:
        selector = manifest.get("spec", {}).get("selector", {})
        wanted = selector.get("matchLabels", selector)
        assert not wanted or not any(wanted.items() <= own.items() for own in labels)


def test_a_package_holds_the_files_that_are_links_here(tmp_path: Path) -> None:
    helm.package(CHART, destination=tmp_path)
    (archive,) = tmp_path.iterdir()
    with helm.Chart.load(archive) as packed:
        files = {entry["name"] for entry in packed.files}
        assert {"files/rules.yml", "files/ultraep.json"} <= files
        assert "ConfigMap" in {entry["kind"] for entry in rendered(packed, EVERYTHING)}


def test_the_chart_has_the_packages_version_and_helm_finds_nothing_wrong(chart: Any) -> None:
    assert (chart.version, chart.metadata["appVersion"]) == (__version__, __version__)
    report = helm.lint(CHART, strict=True)
    assert not report["errors"]
    assert not [entry for entry in report["messages"] if entry["severity"] > 1]


def test_every_value_has_a_schema_and_every_schema_a_default() -> None:
    def names(part: dict[str, Any]) -> set[str]:
        return {
            f"{name}.{inner}" if inner else name
            for name, of in part["properties"].items()
            for inner in (names(of) if "properties" in of else {""})
        }

    def given(part: dict[str, Any], schema: dict[str, Any]) -> set[str]:
        nested = {name for name, of in schema["properties"].items() if "properties" in of}
        return {
            f"{name}.{inner}" if inner else name
            for name, value in part.items()
            for inner in (value if name in nested else {""})
        }

    assert given(read_yaml(CHART / "values.yaml"), SCHEMA) == names(SCHEMA) - {"global"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"engines": "vllm"}, "engines"),
        ({"engine": "tgi"}, "engine"),
        ({"hosts": 0}, "hosts"),
        ({"ranksPerHost": 1}, "ranksPerHost"),
        ({"memory": "lots"}, "memory"),
        ({"model": {"claims": "model"}}, "claims"),
        ({"flags": ["slots=4"]}, "flags"),
        ({"device": "cpu", "hosts": 2}, "hosts"),
        ({"exclusiveTopology": CLIQUE}, "exclusiveTopology"),
        ({"monitoring": {"documentation": "docs/"}}, "documentation"),
    ],
)
def test_a_wrong_value_is_refused_by_name(chart: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        chart.validate_schema(values)
