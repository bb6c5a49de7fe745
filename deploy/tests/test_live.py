"""Every query of the dashboard and every rule, against a real Prometheus that scrapes a sidecar."""

import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from files import ROOT, dashboard, rules
from live import HOSTS, Live, live

PAGE = ROOT / "docs" / "kubernetes.md"
VARIABLES = {"$job": "ultraep", "$group": ".+", "$__rate_interval": "30s"}
QUERIES = [
    pytest.param(target, id=f"{panel['title']} {target['refId']}")
    for panel in dashboard()["panels"]
    for target in panel.get("targets", ())
]


# Panels of what every host counts for its own ranks only; all others show the whole group.
OF_ONE_HOST = {
    "Ranks alive",
    "Time per stage",
    "Weights moved",
    "Age of last heartbeat and last batch",
    "Records lost and missed",
    "Memory reserved for replica slots",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("live")) as started:
        yield started


def filled_in(expression: str) -> str:
    """As Grafana sends it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


@pytest.mark.parametrize("target", QUERIES)
def test_every_panel_has_data(server: Live, target: dict[str, Any]) -> None:
    query = filled_in(target["expr"])
    if target["instant"]:
        series = server.get("query", query=query)["result"]
        values = [entry["value"][1] for entry in series]
    else:
        now = time.time()
        span = {"start": now - 5, "end": now, "step": "1s"}
        series = server.get("query_range", query=query, **span)["result"]
        values = [value for entry in series for _, value in entry["values"]]
    assert any(math.isfinite(float(value)) for value in values), query
    _check_legend(target["legendFormat"], series)


def _check_legend(legend: str, series: list[dict[str, Any]]) -> None:
    wanted = set(re.findall(r"{{\s*(\w+)\s*}}", legend))
    assert all(wanted <= set(entry["metric"]) for entry in series), legend


@pytest.mark.parametrize(
    "target",
    [query for query in QUERIES if str(query.id).rpartition(" ")[0] not in OF_ONE_HOST],
)
def test_what_two_hosts_report_counts_once(server: Live, target: dict[str, Any]) -> None:
    both = filled_in(target["expr"])
    of_host = [both.replace('group=~".+"', f'group=~".+", instance=~"{host}:.+"') for host in HOSTS]
    assert both not in of_host
    now = time.time()
    found = []
    for query in (both, *of_host):
        series = server.get("query", query=query, time=now)["result"]
        found.append({json.dumps(entry["metric"]): float(entry["value"][1]) for entry in series})
    together, *hosts = found
    assert all(together.keys() == host.keys() for host in hosts)
    for name, value in together.items():  # hosts are scraped at other moments, so they differ
        alone = [host[name] for host in hosts]
        if all(map(math.isfinite, (value, *alone))):
            assert min(alone) * 0.5 <= value <= max(alone) * 1.5, name  # not the sum of both


def test_queries_of_the_page_have_data(server: Live) -> None:
    (block,) = re.findall(r"```promql\n(.+?)```", PAGE.read_text(), re.DOTALL)
    for query in block.splitlines():
        values = [entry["value"][1] for entry in server.get("query", query=query)["result"]]
        assert any(math.isfinite(float(value)) for value in values), query


def test_variables_of_the_dashboard_find_something(server: Live) -> None:
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = re.fullmatch(
                r"label_values\((.+), (\w+)\)", variable["query"]
            ).groups()  # type: ignore[union-attr]
            found = server.get(f"label/{label}/values", **{"match[]": filled_in(selector)})
            assert found, variable["name"]


def test_the_first_panel_says_on(server: Live) -> None:
    query = filled_in(dashboard()["panels"][0]["targets"][0]["expr"])
    (series,) = server.get("query", query=query)["result"]
    assert series["value"][1] == "1"


def test_rules_are_evaluated_and_silent_while_all_is_well(server: Live) -> None:
    def evaluated() -> list[dict[str, Any]]:
        groups = server.get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    deadline = time.monotonic() + 20
    while any(rule["health"] == "unknown" for rule in evaluated()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    found = evaluated()
    assert {rule["name"] for rule in found} == {rule["alert"] for rule in rules()}
    assert {rule["health"] for rule in found} == {"ok"}, found
    assert {rule["name"]: rule["state"] for rule in found if rule["state"] != "inactive"} == {}


def test_a_killed_engine_is_noticed(server: Live) -> None:
    server.engine.kill()
    ranks = server.wait_for('ALERTS{alertname="UltraepRankSilent"}')
    assert {entry["metric"]["rank"] for entry in ranks} == {"0", "1", "2", "3"}
    query = filled_in(dashboard()["panels"][0]["targets"][0]["expr"])
    (series,) = server.wait_for(f"({query}) == 0")
    assert series["value"][1] == "0"


def test_a_server_that_could_not_be_balanced_is_shown_as_one(server: Live) -> None:
    """It has no other metric; the variables of the dashboard find it all the same."""
    (server.run_path / "unbalanced").write_text("no expert can be moved\n")
    query = filled_in(dashboard()["panels"][0]["targets"][0]["expr"])
    (series,) = server.wait_for(f"({query}) == -1")
    mappings = dashboard()["panels"][0]["fieldConfig"]["defaults"]["mappings"]
    assert mappings[0]["options"][series["value"][1]]["text"] == "UNBALANCED"
    test_variables_of_the_dashboard_find_something(server)
