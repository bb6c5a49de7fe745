"""The dashboard by Grafana's own types, and what is provisioned."""

import json
import re
from typing import Any

from files import COMPOSE, DEPLOY, dashboard, read_yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

GRID_COLUMNS = 24
BUILT_IN = {"__rate_interval"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_nothing_is_unknown_to_grafana() -> None:
    plugins.register_default_plugins()
    understood = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard())))
    assert _lost(dashboard(), understood) == []


def test_panels_have_their_own_number_and_place() -> None:
    everything = dashboard()["panels"]
    numbers = [panel["id"] for panel in everything]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= GRID_COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells


def test_queries_name_only_variables_that_exist() -> None:
    known = {variable["name"] for variable in dashboard()["templating"]["list"]} | BUILT_IN
    for panel in panels():
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= known
            assert target["datasource"]["uid"] == "${datasource}"


def test_provisioning_finds_the_dashboard_and_the_server() -> None:
    grafana = read_yaml(COMPOSE)["services"]["grafana"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = read_yaml(provisioning / "dashboards" / "ultraep.yml")["providers"]
    mounts = [volume.split(":")[1] for volume in grafana["volumes"]]
    assert f"{provider['options']['path']}/ultraep.json" in mounts
    (source,) = read_yaml(provisioning / "datasources" / "prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in read_yaml(COMPOSE)["services"]


def _lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Places of ``before`` that are missing or different in ``after``."""
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = [(key, value, after.get(key)) for key, value in before.items()]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(index, *pair) for index, pair in enumerate(zip(before, after, strict=True))]
    else:
        return [] if before == after else [path]
    return [
        place for key, old, new in pairs for place in _lost(old, new, f"{path}.{key}".lstrip("."))
    ]
