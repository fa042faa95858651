"""msprobe of MindStudio (package ``mindstudio-probe``):
statistics of every step are dumped, then searched for overflow.

The seam is that of its documentation: ``debugger.start(model)`` before a step, ``stop`` and
``step`` after it, and ``msprobe overflow_check -i DUMP/stepN`` on each dumped step, here through
the class behind that command. Level ``mix``: modules and API calls.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from peers.alarm import Alarm, PeerFailedError, Raise
from peers.clock import Clock

STACK = 6
"""Lines of a stack that are kept."""
LOWERED = {
    "linear": ("linear", "addmm", "mm", "bmm", "matmul", "baddbmm"),
    "matmul": ("matmul", "mm", "bmm", "baddbmm", "mv", "dot"),
    "addmm": ("addmm", "mm"),
    "baddbmm": ("baddbmm", "bmm"),
    "cross_entropy": ("nll_loss_forward", "nll_loss2d_forward", "_log_softmax", "div"),
    "nll_loss": ("nll_loss_forward", "nll_loss2d_forward"),
    "scaled_dot_product_attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_attention_math",
        "bmm",
        "_softmax",
    ),
    "softmax": ("_softmax", "_safe_softmax"),
    "log_softmax": ("_log_softmax",),
    "layer_norm": ("native_layer_norm",),
    "mse_loss": ("mse_loss", "pow", "mean"),
    "embedding": ("embedding",),
    "pow": ("pow", "square"),
    "truediv": ("div",),
}
"""What a call of the Python API runs as, in favour of the peer;
any other runs under its own name.
"""
_CALL = re.compile(r"(\w+)\.(.+?)\.(\d+)\.(forward|backward)(?:\.\d+)?$")
_MODULE = re.compile(r"(?:Module|Cell)\.(.+)\.\w+\.(forward|backward)\.(\d+)$")


@contextmanager
def overflow_check(clock: Clock, alarm: Raise) -> Iterator[None]:
    """Dump every step, and at the end search the dumps in order."""
    try:
        from msprobe.pytorch import PrecisionDebugger
    except ImportError as error:
        raise PeerFailedError(f"msprobe cannot be imported: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        debugger = PrecisionDebugger(dump_path=folder, task="statistics", level="mix")
        state = {"started": False}

        def begin(module: nn.Module, _: Any) -> None:
            if not state["started"] and any(True for _ in module.parameters()):
                state["started"] = True
                debugger.start(module)

        def end_step() -> None:
            if state["started"]:
                debugger.stop()
                debugger.step()
                state["started"] = False

        handle = nn.modules.module.register_module_forward_pre_hook(begin)
        clock.after_step.append(end_step)
        try:
            yield
        finally:
            handle.remove()
            end_step()
            for found in _found(Path(folder)):
                alarm(found)


def _found(folder: Path) -> Iterator[Alarm]:
    from msprobe.overflow_check.analyzer import OverFlowCheck

    steps = sorted(folder.glob("step*"), key=lambda place: int(place.name[4:]))
    for place in steps:
        out = folder / f"found-{place.name}"
        with contextlib.redirect_stdout(io.StringIO()):
            OverFlowCheck(str(place), str(out)).analyze()
        for file in sorted(out.glob("anomaly_analyze_*.json")):
            for node in json.loads(file.read_text()).get("rank_0", []):
                yield _alarm(int(place.name[4:]), node)


def _alarm(step: int, node: dict[str, Any]) -> Alarm:
    """Return an anomaly in the form of all peers.
    The number of a module's call is that of its micro-batch.
    """
    name, parents = node["op_name"], node["construct_info"]
    modules = [_MODULE.match(one) for one in parents]
    inside = [found for found in modules if found]
    micro = int(inside[0][3]) if inside else None
    call = _CALL.match(name)
    ops: tuple[str, ...] = ()
    if call and not _MODULE.match(name):
        short = call[2].strip("_")
        ops = tuple(f"aten.{one}.default" for one in LOWERED.get(short, (short,)))
        if call[4] == "backward":
            ops = (*ops, *(f"aten.{short}_backward.default" for _ in (0,)))
    where = re.sub(r"^(Module|Cell)\.|^\d+\.", "", inside[-1][1]) if inside else ""
    phase = call[4] if call else None
    said = json.dumps({"op_name": name, "construct": parents, "stack": node["stack_info"][:STACK]})
    return Alarm(step, micro, phase, ops, (where,), said)
