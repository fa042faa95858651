"""``python peers/under.py NAME SCRIPT``: run a script under a peer;
what it said becomes ``peer.json``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])

from births import ending, execute  # noqa: E402  (found through the line above)

from peers import builtin, invariants, mindstudio  # noqa: E402
from peers.alarm import Alarm, Peer  # noqa: E402
from peers.clock import Clock, following  # noqa: E402

PEERS: dict[str, Peer] = {
    "plain": builtin.nothing,
    "detect_anomaly": builtin.detect_anomaly,
    "DebugUnderflowOverflow": builtin.debug_underflow_overflow,
    "isfinite hooks": builtin.isfinite_hooks,
    "naive dispatch mode": builtin.naive_dispatch,
    "msprobe": mindstudio.overflow_check,
}
"""Peers that look on from inside the process.
TrainCheck rewrites the script and has a way of its own.
"""


def watch(name: str, script: Path) -> dict[str, Any]:
    """Return the peer's first alarm (or None), how many it gave, how the script ended, and when
    each step did.
    """
    if name == "traincheck":
        return invariants.examine(script)
    clock, alarms, found = Clock(), list[Alarm](), dict[str, Any]()
    began = time.monotonic()
    with following(clock), ending(found), PEERS[name](clock, alarms.append):
        execute(script)
    ended = found["ended"]
    return {
        "alarm": asdict(alarms[0]) if alarms else None,
        "alarms": len(alarms),
        "failed": ended if ended.startswith("PeerFailedError") else "",
        "steps": clock.step,
        "step_ends": clock.ends,
        "seconds": time.monotonic() - began,
        **found,
    }


def package(name: str) -> str:
    """Return the version of a peer's package, or of torch for those that need none."""
    of = {"msprobe": "mindstudio-probe", "traincheck": "traincheck"}
    of |= {"DebugUnderflowOverflow": "transformers"}
    return f"{of.get(name, 'torch')} {version(of.get(name, 'torch'))}"


if __name__ == "__main__":
    said = watch(sys.argv[1], Path(sys.argv[2]).resolve())
    Path("peer.json").write_text(json.dumps(said))
    print(json.dumps({k: v for k, v in said.items() if k != "step_ends"}))
