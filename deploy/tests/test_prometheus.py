"""Alert rules: valid, each of them seen firing and silent, by promtool."""

import re
from typing import Any

from files import DEPLOY, ROOT, RULES, read_yaml, rules, run

PROMETHEUS = DEPLOY / "prometheus"
TESTS = PROMETHEUS / "rules_test.yml"


def test_rules_and_configuration_are_valid() -> None:
    run("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES)
    run("promtool", "check", "config", "--lint=all", "--lint-fatal", PROMETHEUS / "prometheus.yml")


def test_rules_fire_when_they_should() -> None:
    run("promtool", "test", "rules", TESTS)


def test_every_alert_is_seen_firing_and_silent() -> None:
    cases: list[dict[str, Any]] = [
        case for test in read_yaml(TESTS)["tests"] for case in test["alert_rule_test"]
    ]
    names = {rule["alert"] for rule in rules()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert {"summary", "description", "runbook_url"} == set(rule["annotations"])


def test_every_alert_leads_to_a_section_of_the_troubleshooting_page() -> None:
    """At the address where an operator has put the documentation, which is to be filled in."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sections = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#{2,3} (.+)$", page, re.MULTILINE)
    }
    for rule in rules():
        base, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert base == "https://docs.example.com/ultraep-serve/troubleshooting.html"
        assert section in sections
