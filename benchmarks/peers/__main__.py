"""``python -m peers NAME SCRIPT``: run a script under a peer; print what it said as one JSON line, last."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from births import Clock, ending, execute, install

from peers import builtin
from peers.alarm import Alarm, Peer

PEERS: dict[str, Peer] = {
    "detect_anomaly": builtin.detect_anomaly,
    "DebugUnderflowOverflow": builtin.debug_underflow_overflow,
    "isfinite hooks": builtin.isfinite_hooks,
    "naive dispatch mode": builtin.naive_dispatch,
}


def watch(name: str, script: Path) -> dict[str, Any]:
    """Return the peer's first alarm (or None), how many it gave, how the script ended, and the seconds it took."""
    clock, alarms, found = Clock(), list[Alarm](), dict[str, Any]()
    install(clock)
    began = time.monotonic()
    with ending(found), PEERS[name](clock, alarms.append):
        execute(script)
    return {
        "alarm": asdict(alarms[0]) if alarms else None,
        "alarms": len(alarms),
        "steps": clock.step,
        "seconds": time.monotonic() - began,
        **found,
    }


if __name__ == "__main__":
    print(json.dumps(watch(sys.argv[1], Path(sys.argv[2]).resolve())))
