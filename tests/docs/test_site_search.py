"""From a symptom to its cure on the built site, as somebody in need goes: from the front page, with
what people paste into a search box, in at most three clicks.

The site is that of ``make site``; ``NANSTOP_SITE`` names another folder.
"""

import os
import shutil
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("NANSTOP_SITE", ROOT / "build" / "site"))
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
DRIVER = shutil.which("chromedriver") or ""
PATIENCE = 60.0
SHOWN = 3
"""Results that somebody looks at."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium with its driver here"),
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="no site here: make site"),
]

PASTED = {
    "loss is 0.0 and grad_norm nan": "NS201 loss-0-grad_norm-nan",
    "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 4.9e-05}": "NS201 loss-0-grad_norm-nan",
    "loss stuck at ln(V)": "NS111",
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0": "NS201",
    "grad_norm inf, nothing learns": "NS301",
    "RuntimeError: Function 'MulBackward0' returned nan values in its 1th output.": "NS304",
    "ValueError: Attempting to unscale FP16 gradients.": "NS102",
    "element 0 of tensors does not require grad and does not have a grad_fn": "NS114",
    "CUDA error: device-side assert triggered": "NS502",
    "target 32000 is out of bounds": "NS502",
    "torch.OutOfMemoryError: CUDA out of memory.": "NS604",
    "Floating point exception (core dumped)": "NS601",
    "process finished with exit code 139": "NS601",
    "loss scale goes to 0": "NS302",
    "eval loss nan, train loss fine": "NS503",
    "value cannot be converted to type at::Half without overflow": "NS203",
    "cosine similarity gives nan": "NS206",
    "trainer logs loss 0 all the time": "NS801 NS802 NS503 NS701 loss-0",
    "Detected call of `lr_scheduler.step()` before `optimizer.step()`": "NS113",
    "DDP nan but single gpu ok": "NS606",
    "loss jumps when resuming from checkpoint": "NS115",
    "gradient accumulation gives different loss": "NS117",
    "double softmax cross entropy": "NS118",
    "flash attention gives nan eager does not": "NS602",
    "sqrt gradient nan at zero": "NS304",
    "qlora nan loss": "NS107",
    "nan in batch norm running mean": "NS506",
}
PASTED_IN_CHINESE = {
    "训练卡住": "NS605",
    "爆显存": "NS604",
    "多卡训练出现 nan 单卡正常": "NS606",
    "恢复训练之后 loss 突然变大": "NS115",
    "probability tensor contains either inf, nan or element < 0": "NS201",
}
SECTION = {"": "#fix", "zh/": "#_4"}
"""Of what to do, on the page of a finding."""


@pytest.fixture(scope="module")
def address():
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(flag)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


class Visit:
    """What somebody clicks, one after the other."""

    def __init__(self, browser, address):
        self.browser, self.clicks = browser, 0
        browser.get(address)

    def click(self, element):
        before = self.browser.current_url
        self.browser.execute_script("arguments[0].click()", element)
        self.clicks += 1
        return before

    def one(self, css):
        return self.browser.find_element("css selector", css)

    def results(self, text):
        """The first results of a search, as soon as they stand still."""
        self.click(self.one("label.md-search__icon, .md-search__input"))
        box = self.one(".md-search__input")
        self.browser.execute_script("arguments[0].focus()", box)
        box.send_keys(text)
        end, before = time.monotonic() + PATIENCE, None
        while time.monotonic() < end:
            time.sleep(0.5)
            found = self.browser.find_elements(
                "css selector", ".md-search-result__item > .md-search-result__link"
            )
            links = [one.get_attribute("href") for one in found]
            if links and links == before:
                return found[:SHOWN]
            before = links
        raise AssertionError(f"no result for {text}")

    def shows(self, css):
        """Whether a part is there and within the window, once the page stands still."""
        end = time.monotonic() + PATIENCE
        place = "const b = document.querySelector(arguments[0])?.getBoundingClientRect();"
        while not (
            seen := self.browser.execute_script(
                f"{place} return b !== undefined && b.top >= -1 && b.top < innerHeight", css
            )
        ):
            if time.monotonic() > end:
                return seen
            time.sleep(0.2)
        return seen


@pytest.mark.parametrize(
    ("text", "right", "lang"),
    [(text, right, "") for text, right in PASTED.items()]
    + [(text, right, "zh/") for text, right in PASTED_IN_CHINESE.items()],
)
def test_what_is_pasted_leads_to_its_cure_in_three_clicks(text, right, lang, browser, address):
    visit = Visit(browser, address + lang)
    found = visit.results(text)
    links = [one.get_attribute("href") for one in found]
    at = next(
        (at for at, link in enumerate(links) if any(one in link for one in right.split())), None
    )
    if at is None:  # the table of symptoms, which has the finding
        at = next((at for at, link in enumerate(links) if "/troubleshooting/" in link), None)
        assert at is not None, links
        visit.click(found[at])
        code = right.split()[0]
        assert visit.shows("h1")
        visit.click(visit.one(f"a[href*='findings/{code}/']"))
    else:
        visit.click(found[at])
        if "findings" in links[at]:
            visit.click(visit.one(f".md-nav--secondary a[href$='{fix_of(browser)}']"))
            assert visit.shows(fix_of(browser))
    assert "/findings/NS" in browser.current_url
    assert visit.clicks <= 3


def fix_of(browser):
    return SECTION["zh/" if "/zh/" in browser.current_url else ""]


def test_what_the_log_shows_leads_to_its_cure_without_a_search(browser, address):
    visit = Visit(browser, address)
    visit.click(visit.one("a[href='troubleshooting/']"))
    visit.click(visit.one("a[href='#loss-0-grad_norm-nan']"))
    assert visit.shows("#loss-0-grad_norm-nan")
    visit.click(visit.one("#loss-0-grad_norm-nan ~ div a[href*='findings/NS201/']"))
    assert visit.clicks == 3
    assert visit.one("#fix").text.startswith("Fix")


def test_no_page_of_the_front_has_more_than_it_shows(browser, address):
    for page in ("", "tutorial/", "troubleshooting/", "findings/NS201/", "zh/troubleshooting/"):
        for width in (1280, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(address + page)
            over = "return document.documentElement.scrollWidth - innerWidth"
            assert browser.execute_script(over) <= 0, (page, width)
            images = "return [...document.images].filter((one) => !one.naturalWidth).length"
            assert browser.execute_script(images) == 0, (page, width)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
