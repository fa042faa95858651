"""A loop of 20 steps on two ranks that saves its weights in each fifth, with a fault in one step
and a disturbance of one rank: ``disturbed_program.py KIND FAULT RANK``. ``KIND``: how the model is
laid out (``ddp``, ``fsdp``); ``RANK``: the one with the fault. The disturbance is ``DISTURB``, a
``Moment`` as JSON. Without a word of nanstop.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts" / "sharded"))
from rank_programs import KINK, RANK, WORLD, Net, laid_out, tell, wrapped

NUM_STEPS, SAVE_EVERY, BAD_STEP = 20, 5, 6
GLOO_SECONDS = 60
BOTH = -2
"""Instead of a rank: calls are counted on both, none is disturbed."""


class Disturber:
    """Kills, stops or delays this process at a moment, by its number of Python calls
    or by the clock, counted from ``begin`` on. A process of its own does what this one cannot: it
    is forked before there are threads and connections.
    """

    def __init__(self, moment: dict) -> None:
        self.moment, self.num_calls, self.began = moment, 0, 0.0
        self.is_meant = moment["rank"] in (RANK, BOTH)
        self._write = self._forked() if self.is_meant else -1

    def begin(self) -> None:
        """Begin to count."""
        self.began = time.monotonic()
        if not self.is_meant:
            return
        if self.moment["by"] == "clock":
            os.write(self._write, b"c")
        else:
            sys.settrace(self._count)

    def end(self) -> None:
        sys.settrace(None)
        if self.is_meant and self.moment["by"] == "clock":
            with contextlib.suppress(OSError):  # who waits for it may have ended
                os.write(self._write, b"e")

    def _count(self, _frame: object, _event: str, _argument: object) -> None:
        self.num_calls += 1
        if self.num_calls == self.moment["at"]:
            self._strike()

    def _strike(self) -> None:
        Path(f"struck-{RANK}").touch()
        how = self.moment["how"]
        if how == "delay":
            time.sleep(self.moment["seconds"])
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.write(self._write, b"s")  # whoever continues this one must know of it before
            os.kill(os.getpid(), signal.SIGSTOP)

    def _forked(self) -> int:
        read, write = os.pipe()
        if os.fork():
            os.close(read)
            return write
        os.close(write)
        with contextlib.suppress(BaseException):
            self._stand_by(read)
        os._exit(0)

    def _stand_by(self, read: int) -> None:
        trained, asked = os.getppid(), os.read(read, 1)
        if asked == b"c":
            ready, _, _ = select.select([read], [], [], self.moment["at"])
            if ready:
                return  # it is over
            Path(f"struck-{RANK}").touch()
            kill = self.moment["how"] == "kill"
            os.kill(trained, signal.SIGKILL if kill else signal.SIGSTOP)
        if self.moment["how"] != "kill" and asked:
            time.sleep(self.moment["seconds"])
            os.kill(trained, signal.SIGCONT)


def rows(fault: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and targets; the bad row is one of a ``rank`` in one step."""
    x = torch.randn(4 * WORLD * NUM_STEPS, 8, generator=torch.Generator().manual_seed(1))
    y = x.sum(-1).clamp(-2, 2)
    bad = 4 * (BAD_STEP * WORLD + rank) + 1
    if fault == "data":
        x[bad, 2] = float("nan")
    if fault == "gradient":
        x[bad, 2] = KINK
    if fault == "half":
        x[bad] *= 4000
    if fault == "eps":
        x[:, 0] = 0
    return x, y


def save(model: torch.nn.Module, step: int, *, in_parts: bool) -> None:
    """Save all weights, or this rank's part of them, whole or not at all."""
    if RANK and not in_parts:
        return
    weights = {
        name: getattr(p, "_local_tensor", p).detach() for name, p in model.named_parameters()
    }
    file = Path(f"weights-{step:02d}-{RANK}.pt")
    torch.save(weights, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


def main(kind: str, fault: str, rank: str) -> None:
    disturber = Disturber(json.loads(os.environ["DISTURB"]))
    inside = disturber.moment["inside"]
    marks: list[tuple[int, float]] = []
    if not inside:
        disturber.begin()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GLOO_SECONDS))
    net = Net().half() if fault == "half" else Net()
    model = laid_out(net) if kind == "fsdp" else wrapped(net)
    optimizer = (
        torch.optim.SGD(net.parameters(), lr=0.02)
        if fault == "half"
        else torch.optim.AdamW(net.parameters(), lr=0.02, eps=0.0 if fault == "eps" else 1e-8)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26) if fault == "scaler" else None
    x, y = (t.to(net.last.weight.dtype).split(4) for t in rows(fault, int(rank)))
    bad_step = 0 if fault == "eps" else BAD_STEP
    for step in range(NUM_STEPS):
        if step == bad_step:
            if inside:
                disturber.begin()
            marks.append((disturber.num_calls, time.monotonic() - disturber.began))
        optimizer.zero_grad()
        part = step * WORLD + RANK
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            loss = (model(x[part]) - y[part]).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if step == bad_step + 1:
            marks.append((disturber.num_calls, time.monotonic() - disturber.began))
            if inside:
                disturber.end()
        if (step + 1) % SAVE_EVERY == 0:
            save(net, step + 1, in_parts=kind == "fsdp")
    if not inside:
        disturber.end()
    spent = time.monotonic() - disturber.began
    tell(net, calls=disturber.num_calls, seconds=spent, marks=marks)


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:])
    gc.collect()  # a model that goes after its group waits for gloo: pytorch issue 56297
    dist.destroy_process_group()
