"""The page in a real browser: it can be read, nothing overflows, and no script fails.

Chromium runs without a driver: a copy of the page without its policy has a script that writes what
it sees into the document, and the browser prints that. The page itself is loaded as it is to hear
what it complains of.
"""

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import pytest

from nanstop.records import Series
from nanstop.report.html.page import html_page
from nanstop.report.html.run_record import RunRecord
from report.hostile import RUNS
from report.specimens import EVENT, INCIDENT, LOCALIZATION, REPORT, UNSOLVED

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
AXE = Path(os.environ.get("AXE_CORE", "axe.min.js"))
"""axe.min.js of the npm package axe-core, where somebody has put it."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="no chromium on this machine"),
]

PROBE = """
addEventListener("load", async () => {
  const all = (query) => [...document.querySelectorAll(query)];
  const place = (one) => one.getBoundingClientRect();
  const wide = document.documentElement.clientWidth;
  const scrolls = (one) =>
    one && (getComputedStyle(one).overflowX === "auto" || scrolls(one.parentElement));
  const isCut = (one) => {
    const box = place(one), chart = place(one.ownerSVGElement);
    const aside = box.left < chart.left - 1 || box.right > chart.right + 1;
    return aside || box.bottom > chart.bottom + 1;
  };
  const seen = {
    width: wide,
    verdict: document.querySelector(".block.error").innerText,
    beyond: all("body *")
      .filter((one) => !one.closest(".skip") && !scrolls(one) && place(one).right > wide + 1)
      .map((one) => one.outerHTML.slice(0, 80)),
    scroll: document.documentElement.scrollWidth - wide,
    cut: all("svg text").filter(isCut).map((one) => one.textContent),
    charts: all("svg").length,
    empty: all("svg").filter((one) => !one.querySelector(".line path, circle")).length,
    axe: [],
  };
  const copy = document.querySelector("pre.copy");
  if (copy) {
    navigator.clipboard.writeText = async (text) => { seen.copied = text; };
    document.querySelector("button").click();
    seen.copy = copy.textContent;
  }
  if (window.axe) {
    const found = await axe.run();
    seen.axe = found.violations.map((one) => [one.impact, one.id, one.nodes[0].html.slice(0, 99)]);
  }
  const answer = parent.document.createElement("pre");
  answer.id = "seen";
  answer.textContent = JSON.stringify(seen);
  parent.document.body.append(answer);
});
"""


def shown():
    """Every part that a page can have."""
    steps = tuple(range(0, 500, 5))
    sizes = (1.0, 2.0, 4.0, 8.0)
    ranges = (
        Series(name=f"range {i:04d} model.layers.{i}.mlp", steps=(0, 1, 2, 4), values=sizes)
        for i in range(12)
    )
    noted = (
        Series(name="loss_raw", steps=steps, values=tuple(2 + 1 / (1 + step) for step in steps)),
        Series(name="scale", steps=steps, values=tuple(2.0 ** (16 - s // 100) for s in steps)),
        *ranges,
    )
    counted = tuple(replace(one, exponents=((-3, 7), (17, 1))) for one in EVENT.inputs)
    found = replace(LOCALIZATION, first_bad=replace(EVENT, inputs=counted))
    second = replace(UNSOLVED, incident=replace(INCIDENT, id="0008"))
    return RunRecord(reports=(replace(REPORT, localization=found), second), series=noted)


PAGES = {**RUNS, "shown": shown}


def browse(page, folder, *flags):
    """(standard output, standard error) of the browser on a page."""
    file = folder / "page.html"
    file.write_bytes(page.encode())
    made = subprocess.run(
        [
            *(
                BROWSER,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--enable-logging=stderr",
            ),
            *(f"--user-data-dir={folder / 'profile'}", "--dump-dom", *flags, file.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return made.stdout, made.stderr


def probed(page, folder, *, width, dark=False):
    """What the probe saw, in a frame: a window without a head has 500 pixels at least."""
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', page)
    assert policy is not None
    scripts = [AXE.read_text()] if AXE.is_file() else []
    added = "".join(f"<script>{one}</script>" for one in (*scripts, PROBE))
    page = page.replace(policy[0], "").replace("</body>", f"{added}</body>")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    frame = f'<body><iframe width="{width}" height="900" srcdoc="{escape(page)}"></iframe>'
    out, _ = browse(frame, folder, scheme, "--virtual-time-budget=20000", "--window-size=1600,900")
    found = re.search(r'<pre id="seen">(.*?)</pre>', out, re.DOTALL)
    assert found is not None, out[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_can_be_read_and_nothing_overflows(name, width, tmp_path):
    seen = probed(html_page(PAGES[name]()), tmp_path, width=width, dark=width == 390)
    assert seen["width"] in (width, width - 15)  # beside its bar
    assert seen["verdict"].startswith("error[NS")
    assert (seen["beyond"], seen["scroll"], seen["cut"], seen["empty"]) == ([], 0, [], 0)
    assert [one for one in seen["axe"] if one[0] in ("serious", "critical")] == []


def test_the_change_to_make_is_copied(tmp_path):
    seen = probed(html_page(shown()), tmp_path, width=1280)
    assert seen["copied"] == seen["copy"]
    assert "in_float32(" in seen["copied"]
    assert seen["charts"] == 3


@pytest.mark.parametrize("name", PAGES)
def test_the_page_as_it_is_has_no_script_error_and_opens_at_once(name, tmp_path):
    began = time.perf_counter()
    browse("<!doctype html><p>nothing", tmp_path)
    nothing = time.perf_counter() - began
    page = html_page(PAGES[name]())
    began = time.perf_counter()
    out, err = browse(page, tmp_path)
    took = time.perf_counter() - began
    assert "CONSOLE" not in err
    assert out.rstrip().endswith("</html>")
    assert took < nothing + 2.0 * max(1.0, nothing)
