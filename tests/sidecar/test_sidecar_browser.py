"""The page in a real browser, against a live sidecar and against the rings of a stopped run."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.bench_fakes import serving
from tests.support.rings import SyntheticRun, SyntheticTraffic
from tests.support.sidecar_runs import TOKEN
from tests.support.waiting import until
from ultraep_serve.sidecar.access import server_settings
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry.ring import SelfCheck, SelfCheckOutcome
from ultraep_serve.types import CheckResult, ExpertShape, Policy, VerificationCheck

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="needs a browser (Debian: apt-get install chromium chromium-driver)",
    ),
]
SCREEN = {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False}
NOTHING = "\N{EN DASH}"
SHAPE = ExpertShape(num_ranks=4, num_logical_experts=32, num_replica_slots=2)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    started.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SCREEN)
    yield started
    started.quit()


@pytest.fixture
def browser(driver: Any, url: str) -> Iterator[Any]:
    """With nothing left of the last test, and gone from the page before its server is."""
    driver.get_log("browser")
    yield driver
    driver.get("about:blank")


@pytest.fixture
def run(run_path: Path) -> Iterator[SyntheticRun]:
    made = SyntheticRun(run_path, SHAPE, num_layers=6, traffic=SyntheticTraffic(balanced_share=0.0))
    yield made
    with contextlib.suppress(ValueError):
        made.close()


@pytest.fixture
def url(run_path: Path, run: SyntheticRun) -> Iterator[str]:
    """A sidecar over ``run``, served by a thread of this process."""
    with serving(**server_settings(create_app(run_path, TOKEN))) as address:
        yield address


def text(browser: Any, selector: str) -> str:
    found: str = browser.find_element("css selector", selector).text
    return found


def texts(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    found: list[str] = browser.execute_script(script, selector)
    return found


def no_complaints(browser: Any) -> None:
    """Nothing was blocked by the content security policy, nothing was missing, nothing threw.

    Chromium also complains of the status 503 of /readyz.
    """
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in severe if "/readyz - " not in entry["message"]]


def drawn(browser: Any, selector: str) -> int:
    """How many shapes an SVG has."""
    script = "return document.querySelectorAll(arguments[0]).length"
    return int(browser.execute_script(script, selector))


def test_all_that_matters_is_seen_without_scrolling(
    browser: Any, run: SyntheticRun, url: str
) -> None:
    for _ in range(5):
        run.batch()
    browser.get(url)
    until(lambda: "BALANCING" in text(browser, "#state"))
    until(lambda: text(browser, "#before") != NOTHING)
    assert float(text(browser, "#before")) > 1.1
    assert float(text(browser, "#after")) < 1.05
    assert text(browser, "#batches") == "5 planned · 25 small"
    assert texts(browser, "#ranks span") == ["0", "1", "2", "3"]
    assert "4 of 4 alive" in text(browser, "#ranks-count")
    assert "times what it costs" in text(browser, "#savings-fine")
    assert "number 5," in text(browser, "#batch-age")
    until(lambda: drawn(browser, "#heat-before rect") == drawn(browser, "#heat-after rect") == 24)
    assert drawn(browser, "#chart polyline") == 4
    until(lambda: drawn(browser, "#stack-after rect") > 4)
    height = "return document.documentElement.scrollHeight <= innerHeight"
    assert browser.execute_script(height)
    assert "time" not in text(browser, "#imbalance-fine") + text(browser, "#ranks-count")
    run.traffic = replace(run.traffic, speeds=(1024, 1024, 512, 1024))
    run.batch()
    until(lambda: "by time" in text(browser, "#imbalance-fine"))
    assert "rank 2 at" in text(browser, "#ranks-count")
    assert browser.execute_script(height)
    no_complaints(browser)


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_nothing_is_cut_off_on_a_smaller_screen(
    browser: Any, run: SyntheticRun, url: str, width: int
) -> None:
    run.batch()
    run.control.switch_off_in_doubt()
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**SCREEN, "width": width})
    browser.get(url)
    until(lambda: "setting a policy switches it on again" in text(browser, "#reason"))
    until(lambda: "floor 1.00" in text(browser, "#imbalance-fine"))
    until(lambda: "expert" in text(browser, "#plan-replicas"))
    for selector in ("html", "header *", ".tile *", "p", "h2"):
        script = (
            "return [...document.querySelectorAll(arguments[0])].filter("
            "e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map(e => e.id || e.tagName)"
        )
        assert browser.execute_script(script, selector) == []
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SCREEN)
    no_complaints(browser)


def test_what_happens_is_shown(browser: Any, run: SyntheticRun, url: str, run_path: Path) -> None:
    browser.get(url)
    until(lambda: "BALANCING" in text(browser, "#state"))
    until(lambda: "no prefill batch" in text(browser, "#imbalance-fine"))
    run.batch()
    until(lambda: "number 1," in text(browser, "#batch-age"))
    run.recorders[2].close()
    until(lambda: "NOT READY" in text(browser, "#state"))
    assert "rank 2" in text(browser, "#reason")
    levels = "return [...document.querySelectorAll('#ranks span')].map(e => e.dataset.level)"
    until(lambda: browser.execute_script(levels) == ["good", "good", "bad", "good"])
    no_complaints(browser)
    run.close()
    until(lambda: "stopped" in text(browser, "#reason"))
    assert "number 1," in text(browser, "#batch-age")
    for rank in range(4):
        (run_path / f"ring-{rank}").unlink()
    until(lambda: "NO ENGINE" in text(browser, "#state"))
    (run_path / "unbalanced").write_text("no expert can be moved\n")
    until(lambda: "NOT BALANCED" in text(browser, "#state"))
    assert "without balancing: no expert can be moved" in text(browser, "#reason")


def test_a_layer_is_chosen_and_its_plan_is_shown(browser: Any, run: SyntheticRun, url: str) -> None:
    run.batch()
    browser.get(url)
    until(lambda: "planned:" in text(browser, "#plan-fine"))
    layers = httpx.get(f"{url}/v1/balance").json()["layers"]
    worst = max(layers, key=lambda layer: layer["imbalance"]["before"]["mean"])["layer"]
    chosen = "return document.getElementById('layer').value"
    assert browser.execute_script(chosen) == str(worst)
    other = (worst + 1) % 6
    click = "document.querySelector(`#heat-after rect[data-layer='${arguments[0]}']`).dispatchEvent"
    browser.execute_script(f"{click}(new MouseEvent('click', {{bubbles: true}}))", other)
    plan = httpx.get(f"{url}/v1/balance/layers/{other}").json()["last"]
    shown = f"{plan['imbalance_before']:.2f} → {plan['imbalance_after']:.2f}"
    until(lambda: shown in text(browser, "#plan-fine"))
    assert browser.execute_script(chosen) == str(other)
    copies = sum(replica["assignments"] > 0 for replica in plan["replicas"])
    hatched = "#stack-after rect[fill='url(#hatch-after)']"
    until(lambda: drawn(browser, hatched) == copies)
    no_complaints(browser)


def test_the_policy_is_switched_with_the_token_only(
    browser: Any, run: SyntheticRun, url: str
) -> None:
    run.batch()
    browser.get(url)
    until(lambda: texts(browser, "#policies button") == ["off", "quota"])
    choose = "document.querySelector('#policies button').click()"
    browser.execute_script(choose)
    until(lambda: "Bearer" in text(browser, "#policy-message"))
    assert run.control.policy is Policy.QUOTA
    browser.find_element("css selector", "#token").send_keys(TOKEN)
    browser.execute_script(choose)
    until(lambda: run.control.policy is Policy.OFF)
    until(lambda: "OFF" in text(browser, "#state"))
    assert TOKEN not in browser.page_source


def test_what_was_verified_is_shown_and_a_failure_is_red(
    browser: Any, url: str, run: SyntheticRun
) -> None:
    checks = (CheckResult("kernels", 3.1, "64 loads"),)
    for recorder in run.recorders:
        recorder.set_self_check(SelfCheck(SelfCheckOutcome.PASSED, checks))
        recorder.count_verified(VerificationCheck.SLOTS, 1)
    browser.get(url)
    until(lambda: "verified 1 layers, 0 failed" in text(browser, "#proof"))
    assert "self-check passed in 3.10 s" in text(browser, "#proof")
    colour = "return getComputedStyle(document.querySelector('#proof')).color"
    before = browser.execute_script(colour)
    run.recorders[1].count_verification_failure(VerificationCheck.SLOTS)
    run.control.switch_off_in_doubt()
    until(lambda: "1 failed" in text(browser, "#proof"))
    until(lambda: "SWITCHED ITSELF OFF" in text(browser, "#state"))
    assert browser.execute_script(colour) != before
    no_complaints(browser)
