"""The page in a real browser, against a live sidecar and against the rings of a stopped run."""

import contextlib
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

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
    size = {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    started.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
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
    settings = server_settings(create_app(run_path, TOKEN))
    settings |= {"log_level": "warning", "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(**settings))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def text(browser: Any, selector: str) -> str:
    found: str = browser.find_element("css selector", selector).text
    return found


def texts(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    found: list[str] = browser.execute_script(script, selector)
    return found


def no_complaints(browser: Any) -> None:
    """Nothing was blocked by the content security policy, nothing was missing, nothing threw."""
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe


def colored_pixels(browser: Any, canvas: str) -> int:
    """How many different colours a canvas shows."""
    script = """
      const c = document.getElementById(arguments[0]);
      const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
      return new Set(new Uint32Array(data.buffer)).size;
    """
    return int(browser.execute_script(script, canvas))


def test_all_that_matters_is_seen_without_scrolling(
    browser: Any, run: SyntheticRun, url: str
) -> None:
    for _ in range(5):
        run.batch()
    browser.get(url)
    until(lambda: "BALANCING" in text(browser, "#state"))
    until(lambda: text(browser, "#before-mean") != NOTHING)
    assert float(text(browser, "#before-mean")) > 1.1
    assert float(text(browser, "#after-mean")) < 1.05
    assert text(browser, "#prefill") == "5"
    assert text(browser, "#decode") == "25"
    assert texts(browser, "#ranks .rank") == ["0", "1", "2", "3"]
    assert "4 of 4 alive" in text(browser, "#ranks-count")
    assert "times what it costs" in text(browser, "#savings-fine")
    height = "return document.documentElement.scrollHeight <= innerHeight"
    assert browser.execute_script(height)
    until(lambda: len(texts(browser, "#batches tbody tr")) == 5)
    assert colored_pixels(browser, "heat-before") > 10
    assert browser.execute_script("return document.querySelectorAll('.u-over').length") == 2
    assert "time" not in text(browser, "#imbalance-fine") + text(browser, "#ranks-count")
    assert not browser.find_element("css selector", "#key-time").is_displayed()
    run.traffic = replace(run.traffic, speeds=(1024, 1024, 512, 1024))
    run.batch()
    until(lambda: "by time" in text(browser, "#imbalance-fine"))
    assert "rank 2 at 0.50 of the speed" in text(browser, "#ranks-count")
    until(lambda: browser.find_element("css selector", "#key-time").is_displayed())
    assert browser.execute_script(height)
    no_complaints(browser)


def test_what_happens_is_shown(browser: Any, run: SyntheticRun, url: str) -> None:
    browser.get(url)
    until(lambda: "BALANCING" in text(browser, "#state"))
    assert "No prefill batch" in text(browser, "#batches tbody")
    run.batch()
    until(lambda: "batch 1," in text(browser, "#now-batch"))
    run.recorders[2].close()
    until(lambda: "NOT READY" in text(browser, "#state"))
    assert "rank 2" in text(browser, "#reason")
    levels = "return [...document.querySelectorAll('.rank')].map(e => e.dataset.level)"
    assert browser.execute_script(levels) == ["good", "good", "bad", "good"]
    no_complaints(browser)


def test_down_to_one_batch_with_the_keyboard(browser: Any, run: SyntheticRun, url: str) -> None:
    run.batch()
    browser.get(url)
    until(lambda: texts(browser, "#batches tbody button") == ["1"])
    browser.find_element("css selector", "#batches tbody button").send_keys("\n")
    until(lambda: "planned" in text(browser, "#plan-title"))
    detail = httpx.get(f"{url}/v1/balance/batches/1").json()
    worst = max(detail["layers"], key=lambda layer: layer["imbalance_before"])["layer"]
    assert f"Layer {worst}:" in text(browser, "#plan-title")
    other = worst + 1 if worst < 5 else worst - 1
    arrow = "\ue015" if other > worst else "\ue013"  # down, up
    browser.switch_to.active_element.send_keys(arrow)
    until(lambda: f"Layer {other}:" in text(browser, "#plan-title"))
    plan = httpx.get(f"{url}/v1/balance/batches/1/layers/{other}").json()
    assert len(texts(browser, "#replicas tbody tr")) == len(plan["replicas"])
    assert len(texts(browser, "#stages tbody tr")) == 7
    assert colored_pixels(browser, "stack-after") > 10
    browser.switch_to.active_element.send_keys("\ue00c")  # escape
    until(lambda: not browser.execute_script("return document.getElementById('detail').open"))
    no_complaints(browser)


def test_the_policy_is_switched_with_the_token_only(
    browser: Any, run: SyntheticRun, url: str
) -> None:
    run.batch()
    browser.get(url)
    until(lambda: "off" in texts(browser, "#policies button"))
    choose = "document.querySelector('#policies button[data-policy=off]').click()"
    browser.execute_script(choose)
    until(lambda: "Bearer" in text(browser, "#policy-message"))
    assert run.control.policy is Policy.QUOTA
    browser.find_element("css selector", "#token").send_keys(TOKEN)
    browser.execute_script(choose)
    until(lambda: run.control.policy is Policy.OFF)
    run.batch()
    until(lambda: "OFF" in text(browser, "#state"))
    assert TOKEN not in browser.page_source


def test_a_stopped_run_is_shown_as_it_was_left(
    browser: Any, run: SyntheticRun, url: str, run_path: Path
) -> None:
    for _ in range(3):
        run.batch()
    run.close()
    browser.get(url)
    until(lambda: "NOT READY" in text(browser, "#state"))
    assert "stopped" in text(browser, "#reason")
    until(lambda: texts(browser, "#batches tbody button") == ["3", "2", "1"])
    assert float(text(browser, "#now-before")) > 1.1
    (run_path / "ring-0").write_bytes(b"nonsense")
    for rank in range(1, 4):
        (run_path / f"ring-{rank}").unlink()
    until(lambda: "NO ENGINE" in text(browser, "#state"))


def test_a_server_that_runs_unbalanced_says_so(browser: Any, url: str, run_path: Path) -> None:
    (run_path / "unbalanced").write_text("no expert can be moved\n")
    browser.get(url)
    until(lambda: "NOT BALANCED" in text(browser, "#state"))
    assert "runs without balancing: no expert can be moved" in text(browser, "#reason")


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_system_until_told_otherwise(browser: Any, url: str, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(url)
    background = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    is_dark = scheme == "dark"
    assert (max(browser.execute_script(background)) < 128) == is_dark
    for _ in range(1 if is_dark else 2):  # auto, light, dark
        browser.find_element("css selector", "#theme").click()
    assert (max(browser.execute_script(background)) < 128) != is_dark
    browser.execute_script("localStorage.clear()")


def test_the_interface_is_documented_offline(browser: Any, url: str) -> None:
    browser.get(f"{url}/docs")
    until(lambda: "/v1/balance" in text(browser, "main"))
    assert "Max/mean of assignments over ranks" in text(browser, "main")
    no_complaints(browser)
