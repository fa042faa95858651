"""The live page in a real browser, with a real training beside it."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nanstop.records import Series
from nanstop.store.incidents import Store
from nanstop.store.live_file import LiveFile
from nanstop.store.summary import FindingRow, Summary, summary_row
from report.hostile import MARKUP
from report.specimens import REPORT, UNSOLVED
from view_server import served

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
pytest.importorskip("uvicorn", reason="pip install nanstop[live]")

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
DRIVER = shutil.which("chromedriver") or ""
AXE = Path(os.environ.get("AXE_CORE", "axe.min.js"))
PATIENCE = 180.0
"""Seconds that a busy machine may take for what comes within seconds."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium with its driver here"),
]

needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="no axe.min.js here: set AXE_CORE")

TRAINING = """
import sys, time
import torch, nanstop

seconds, out = float(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
began, step = time.monotonic(), 0
with nanstop.watch(model, optimizer, out=out) as watch:
    while time.monotonic() - began < seconds or step < 40:
        batch = torch.randn(8, 8)
        if step == 20:
            batch[3] = float("inf")
        watch.step(lambda rows: (model(rows) - rows.sum(1, keepdim=True)).square().mean(), batch)
        watch.update()
        time.sleep(0.05)
        step += 1
"""

SEEN = """
const all = (query) => [...document.querySelectorAll(query)];
const place = (one) => one.getBoundingClientRect();
const wide = document.documentElement.clientWidth;
const scrolls = (one) =>
  one && (getComputedStyle(one).overflowX === "auto" || scrolls(one.parentElement));
const isCut = (one) => {
  const box = place(one), chart = place(one.ownerSVGElement);
  return box.left < chart.left - 1 || box.right > chart.right + 1 || box.bottom > chart.bottom + 1;
};
return {
  beyond: all("body *")
    .filter((one) => !one.closest(".skip") && !scrolls(one) && place(one).right > wide + 1)
    .map((one) => one.outerHTML.slice(0, 80)),
  scroll: document.documentElement.scrollWidth - wide,
  cut: all("svg text").filter(isCut).map((one) => one.textContent),
  charts: all("svg").length,
  empty: all("svg").filter((one) => !one.querySelector(".line path, circle")).length,
  states: all(".state").map((one) => one.textContent),
  link: document.getElementById("link").textContent,
  steps: all(".said").map((one) => parseInt(one.textContent)),
  text: document.body.innerText,
};
"""


@contextmanager
def opened(address, *, width=1280, dark=False):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", scheme):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(address)
        yield browser
    finally:
        browser.quit()


def seen(browser):
    return browser.execute_script(SEEN)


def until(browser, holds, *, seconds=PATIENCE):
    """What the page shows as soon as ``holds`` says so of it."""
    end = time.monotonic() + seconds
    while not holds(found := seen(browser)):
        assert time.monotonic() < end, json.dumps(found)[:3000]
        time.sleep(0.3)
    return found


def faults(browser):
    """Serious faults of accessibility that axe-core finds, where it is here."""
    if not AXE.is_file():
        return []
    browser.execute_script(AXE.read_text())
    found = browser.execute_async_script(
        "axe.run().then((found) => arguments[0](found.violations.map("
        "(one) => [one.impact, one.id, one.nodes[0].html.slice(0, 99)])))"
    )
    return [one for one in found if one[0] in ("serious", "critical")]


def complaints(browser):
    """What the browser complains of, but for connections that were refused."""
    said = [one["message"] for one in browser.get_log("browser")]
    return [one for one in said if "ERR_CONNECTION" not in one and "ERR_INCOMPLETE" not in one]


@contextmanager
def training(folder, seconds):
    script = folder.parent / "train.py"
    script.write_text(TRAINING)
    process = subprocess.Popen(
        [sys.executable, str(script), str(seconds), str(folder)],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def recorded(folder, num_steps=300, host="SFTTrainer"):
    """A run that is under way, as its files say it."""
    file = LiveFile(folder, {"host": host})
    steps = range(num_steps)
    series = {
        "loss_raw": [(step, 1.0 + 3.0 / (1 + step)) for step in steps],
        "loss_logged": [(step, 1.0 + 3.0 / (1 + step)) for step in steps[::10]],
        "grad_norm": [(step, 10.0 ** (step % 5)) for step in steps],
        "scale": [(step, 2.0 ** (16 - step // 50)) for step in steps],
        "lr": [(step, 1e-4 * step) for step in steps],
        "headroom": [(step, 9.0 - step / 100) for step in steps[::10]],
        MARKUP: [(0, 1.0), (1, 2.0)],
    }
    file.append({"step": num_steps - 1, "series": series})
    file.append({"stage": "proof", "of": 299, "trials": 40, "seconds": 600.0})
    file.append({"stage": "proof", "of": 299, "tried": 7, "best": f"keep `{MARKUP}` in float32"})
    file.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_runs_stand_side_by_side_and_nothing_overflows(width, dark, tmp_path):
    for name in ("first", "second-of-" + "a-very-long-name-" * 6):
        (tmp_path / name).mkdir()
        recorded(tmp_path / name)
    with served(tmp_path) as address, opened(address, width=width, dark=dark) as browser:
        found = until(browser, lambda now: now["charts"] == 10)
        assert found["states"] == ["investigating"] * 2
        assert "7 trials of at most 40" in found["text"]
        assert (found["beyond"], found["scroll"], found["cut"], found["empty"]) == ([], 0, [], 0)
        left = browser.execute_script(
            "return [...document.querySelectorAll('#runs > section')]"
            ".map((one) => one.getBoundingClientRect().left)"
        )
        assert (left[0] == left[1]) is (width == 390)
        assert faults(browser) == []
        assert complaints(browser) == []


@needs_axe
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_of_incidents_is_accessible(width, dark, tmp_path):
    store = Store(tmp_path)
    for at, one in enumerate((REPORT, UNSOLVED)):
        store.open_incident()
        store.write_report(replace(one, incident=replace(one.incident, id=f"000{at}")))
    rows = tuple(map(summary_row, store.reports.values()))
    row = FindingRow(code="NS101", title="t", where="w", confidence="likely", step=3)
    store.write_summary(Summary(incidents=rows, findings=(row,), steps=2))
    recorded(tmp_path)
    with served(tmp_path) as address, opened(address, width=width, dark=dark) as browser:
        until(browser, lambda now: "error[NS201]" in now["text"] and now["charts"] > 0)
        browser.execute_script(
            "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
        )
        assert faults(browser) == []


def test_a_report_is_read_hovered_opened_and_copied(tmp_path):
    trial = replace(REPORT.proof.baseline, key=REPORT.localization.key)
    report = replace(REPORT, proof=replace(REPORT.proof, ablations=(trial,)))
    store = Store(tmp_path)
    store.open_incident()
    store.write_report(replace(report, incident=replace(report.incident, id="0000")))
    store.write_summary(Summary(incidents=tuple(map(summary_row, store.reports.values()))))
    sizes = Series(name="range 0000 model.norm", steps=(0, 8), values=(1.0, 40000.0))
    store.write_series((sizes,))
    with served(tmp_path) as address, opened(address) as browser:
        until(browser, lambda now: "The whole report" in now["text"])
        browser.find_element("link text", "The whole report").click()
        browser.find_element("css selector", "h1")
        assert browser.find_element("css selector", ".block.error").text.startswith("error[NS201]")
        cell = browser.find_element("css selector", ".heat td.level-0, .heat td.level-1")
        webdriver.ActionChains(browser).move_to_element(cell).perform()
        assert cell.value_of_css_property("outline-style") == "solid"
        assert cell.get_attribute("title") == "step 8, largest 4e+04"
        opened_by = browser.find_element("css selector", ".trial summary")
        told = browser.find_element("css selector", ".trial dl")
        assert not told.is_displayed()
        opened_by.click()
        assert told.is_displayed()
        assert told.text.startswith("what failed\n")
        button = browser.find_element("css selector", "pre.copy").find_element(
            "xpath", "preceding-sibling::button[1]"
        )
        button.click()
        end = time.monotonic() + PATIENCE
        while button.text == "Copy":
            assert time.monotonic() < end
        code = browser.find_element("css selector", "pre.copy").get_attribute("textContent")
        assert button.text == "Copied"
        browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
        assert browser.execute_script("return navigator.clipboard.readText()") == code
        assert complaints(browser) == []


@needs_axe
def test_axe_finds_what_is_planted(tmp_path):
    recorded(tmp_path)
    with served(tmp_path) as address, opened(address) as browser:
        until(browser, lambda now: now["charts"] > 0)
        browser.execute_script("document.body.append(document.createElement('button'))")
        assert [name for _, name, _ in faults(browser)] == ["button-name"]


def test_what_was_opened_or_closed_stays_so(tmp_path):
    out = tmp_path / "run"
    with training(out, 600), served(out) as address, opened(address) as browser:
        until(browser, lambda now: "error[NS501]" in now["text"])
        browser.find_element("css selector", "details > summary").click()
        closed = until(browser, lambda now: "error[NS501]" not in now["text"])
        later = until(browser, lambda now: now["steps"][0] > closed["steps"][0])
        assert "error[NS501]" not in later["text"]
        assert complaints(browser) == []


def test_a_run_of_a_minute_is_followed_to_its_end(tmp_path):
    out = tmp_path / "run"
    with training(out, 60) as process, served(out) as address, opened(address) as browser:
        steps = []
        while process.poll() is None:
            found = seen(browser)
            steps.append(found["steps"][0] if found["steps"] else 0)
            time.sleep(1.0)
        assert steps == sorted(steps)
        assert len(set(steps)) > 10
        found = until(browser, lambda now: now["states"] == ["over"])
        assert "error[NS501]" in found["text"]
        assert "1 update skipped" in found["text"]
        assert found["charts"] >= 3
        assert found["empty"] == 0
        assert complaints(browser) == []


def test_the_page_survives_a_restart_of_the_server(tmp_path):
    recorded(tmp_path)
    with ExitStack() as stack:
        with served(tmp_path) as address:
            browser = stack.enter_context(opened(address))
            until(browser, lambda now: now["charts"] == 5)
        lost = until(browser, lambda now: "following" not in now["link"])
        assert lost["charts"] == 5
        recorded(tmp_path, num_steps=400)
        with served(tmp_path) as again:
            assert again == address
            found = until(browser, lambda now: now["link"] == "following" and 400 in now["steps"])
            assert found["charts"] == 5


def test_run_live_serves_its_run_and_tells_its_end(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "nanstop", "run", "--live", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, str(script), "20", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        line = ""
        while "follow this run at" not in line:
            line = process.stderr.readline()
            assert line, "it ended without an address"
        with opened(line.split(" at ")[1].strip()) as browser:
            found = until(browser, lambda now: now["states"] == ["over"] or "ended" in now["link"])
            assert found["charts"] >= 3
            last = until(browser, lambda now: "ended" in now["link"])
            assert last["charts"] >= 3
    finally:
        process.terminate()
        process.communicate(timeout=60)
