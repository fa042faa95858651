"""Every reviewed rendering by file name.
``python tests/report/renderings.py`` writes the files anew for review.
"""

from pathlib import Path

from nanstop.report.text.terminal import render, render_finding, render_summary
from report.specimens import FINDING, REPORT, UNSOLVED, UPDATE

SNAPSHOTS = Path(__file__).with_name("snapshots")
RECORD = ".nanstop/0007/report.json"


def renderings():
    return {
        "proven.txt": render(REPORT, record=RECORD),
        "proven_80.txt": render(REPORT, record=RECORD, width=80),
        "proven_color.txt": render(REPORT, record=RECORD, width=80, color=True),
        "unsolved.txt": render(UNSOLVED),
        "unsolved_80.txt": render(UNSOLVED, width=80),
        "update.txt": render(UPDATE),
        "finding.txt": render_finding(FINDING),
        "summary.txt": render_summary([REPORT, UNSOLVED], [FINDING], steps=500, seconds=312.04),
        "healthy.txt": render_summary([], steps=1, seconds=3.0),
    }


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for name, text in renderings().items():
        (SNAPSHOTS / name).write_text(text + "\n", encoding="utf-8")
