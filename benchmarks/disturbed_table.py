"""What became of disturbed runs, as a table, a page's section, and a list of what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "disturbed.json"


def problems(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Return what is not as it is to be, a line each."""
    found = []
    for run in runs:
        name = f"seed {run['seed']}"
        found += [f"{name}: hung"] * (None in run["codes"])
        found += [f"{name}: {one}" for one in run["broken"]]
        found += [f"{name}: {one} is not finite" for one in run["bad"]]
        if not is_sensible(run):
            found.append(f"{name}: ended with {run['codes']}")
    return found


def is_sensible(run: dict[str, Any]) -> bool:
    """Return whether both launchers ended as such a run is to end: 0 at its end, 137 for who was
    killed, 1 for an exchange that another is missed in, 3 where nanstop has stopped the training,
    143 for who was ended by the launcher.
    """
    codes, rank = run["codes"], run["moment"]["rank"]
    stops = run["plan"]["fault"] == "eps"
    if run["moment"]["how"] == "kill" and run["struck"]:
        return codes[rank] in (137, 0, 3) and codes[1 - rank] in (0, 1, 3, 143)
    return codes == [0, 0] or (stops and codes == [3, 3])


def shown(runs: Iterable[dict[str, Any]]) -> Table:
    return Table()


def write_page() -> None:
    pass
