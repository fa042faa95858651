"""Commands that look for what will fail: before a run, or by short runs of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, printable, progress, show
from nanstop.errors import NanstopError

if TYPE_CHECKING:
    from nanstop.commands.check.check import Preflight


def check(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="A script or command with its arguments, a config file of trl, or a checkpoint.",
        ),
    ],
    static: Annotated[
        bool, typer.Option("--static", help="Look at facts only: run no first window.")
    ] = False,
    machine: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What `nanstop env --json` says where the run will really be."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say what will go wrong with a run, before its first step. Nothing is trained, saved or pushed."""
    from nanstop.commands.check import check

    there = check.read_machine(machine) if machine is not None else None
    if check.is_config(command):
        found = check.preflight(_config(command), there)
    elif check.is_checkpoint(command):
        found = check.check_checkpoint(Path(command[0]))
    else:
        found = check.check_script(command, static=static, machine=there)
    show(found, printable(check.render(found)), as_json)
    return FINDINGS if found.findings else OK


def _config(command: list[str]) -> Preflight:
    from nanstop.hosts.trainer.trl_config import read_config

    return read_config(Path(command[0]))


def bisect_configs(  # noqa: PLR0913, PLR0917 - one for each option
    bad: Annotated[
        str, typer.Argument(metavar="BAD", help="A config that fails, or a quoted command line.")
    ],
    good: Annotated[
        str, typer.Argument(metavar="GOOD", help="One that does not, of the same script.")
    ],
    script: Annotated[
        str | None, typer.Option(metavar="SCRIPT", help="The script that reads the configs.")
    ] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", help="Trials side by side.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds a trial may take.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="MB", help="Memory of a trial.")] = None,
    limit: Annotated[int | None, typer.Option(help="Trials in all.")] = None,
    executor: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Trials fork from a process that has imported torch (fork), start by themselves "
            "(spawn), or are handed to a Ray cluster (ray).",
        ),
    ] = "fork",
    as_json: AsJson = False,
) -> int:
    """Find the smallest difference between a training that fails and one that does not, by running both."""
    from nanstop.commands.bisect.bisect import Limits, run_bisect
    from nanstop.commands.bisect.configs import read_pair
    from nanstop.commands.bisect.result import render

    memory_bytes = None if memory is None else int(memory * 2**20)
    limits = Limits(timeout=timeout, memory_bytes=memory_bytes, jobs=jobs, trials=limit)
    pair = read_pair(bad, good, script)
    result = run_bisect(pair, limits=limits, where=executor, announce=progress)
    show(result, printable(render(result)), as_json)
    return OK if result.status == "found" else FINDINGS


def lr_range(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="SCRIPT or -m MODULE, with arguments.")
    ],
    low: Annotated[float, typer.Option(help="First learning rate.")] = 1e-7,
    high: Annotated[float, typer.Option(help="Last learning rate.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the sweep.")] = 100,
    as_json: AsJson = False,
) -> int:
    """Try rising learning rates on a script's own training, and suggest a range. Nothing is saved."""
    from nanstop.commands.lr_range import lr_range as sweeps

    found = sweeps.lr_range(command, low=low, high=high, steps=steps)
    show(found, sweeps.render(found, str(sweeps.result_file())), as_json)
    return OK if found.status == "found" else FINDINGS


def doctor(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="SCRIPT or -m MODULE, with arguments.")
    ],
    as_json: AsJson = False,
) -> int:
    """Plant failures in a copy of a script's training: which of its own NaN guards act? Nothing is saved."""
    from nanstop.commands.doctor.doctor import doctor as audit
    from nanstop.commands.doctor.text import render

    found = audit(command)
    show(found, printable(render(found)), as_json)
    return FINDINGS if found.num_reaching else OK


def plan(
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT|SCRIPT", help="A folder, or a script; its own arguments after --."
        ),
    ],
    dtype: Annotated[str, typer.Option(metavar="FORMAT", help="fp16 or bf16.")] = "fp16",
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Token ids, one sequence a line; else random ones."),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the tried updates [1e-5].")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Begin no new trial after this long.")] = 60.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan here.")] = None,
    as_json: AsJson = False,
) -> int:
    """Find the smallest float32 regions under which a narrow format trains as float32 does. Nothing is trained."""
    from nanstop.commands.plan.plan import plan_checkpoint, plan_script

    if Path(target[0]).is_dir():
        if len(target) > 1:
            raise NanstopError(f"a checkpoint takes no arguments: {' '.join(target[1:])}")
        found = plan_checkpoint(Path(target[0]), dtype=dtype, data=data, lr=lr, seconds=seconds)
    else:
        if data is not None or lr is not None:
            raise NanstopError("a script brings its own data and learning rate")
        found = plan_script(target, dtype=dtype, seconds=seconds)
    if out is not None:
        found.save(out)
    written = f"\nwritten to {out}" if out is not None else ""
    show(found.record, printable(str(found)) + written, as_json)
    return OK if found.found else FINDINGS


def scan(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A .safetensors or .bin file, or their folder."),
    ],
    full: Annotated[
        bool, typer.Option("--full", help="Count small values in every chunk; slower.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Read a checkpoint's weights: non-finite values, ranges, which formats they fit. None of its code is run."""
    from dataclasses import asdict

    from nanstop.commands.scan import scan as scanning
    from nanstop.commands.scan.text import render_scan

    found = scanning.scan(checkpoint, full=full)
    said = scanning.findings(found)
    value = asdict(found) | {"findings": said}
    show(value, render_scan(printable(found), printable(said)), as_json)
    return FINDINGS if said else OK
