"""`nanstop plan`: find a precision plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanstop.cli.terminal import FINDINGS, OK, AsJson, Lang, printable, show, waiting
from nanstop.errors import NanstopError
from nanstop.language.translate import translated


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
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Find the smallest float32 regions under which a narrow format trains as float32 does.

    Nothing is trained.
    """
    from nanstop.commands.plan.plan import plan_checkpoint, plan_script

    if Path(target[0]).is_dir():
        if len(target) > 1:
            raise NanstopError(f"a checkpoint takes no arguments: {' '.join(target[1:])}")
        found = plan_checkpoint(Path(target[0]), dtype=dtype, data=data, lr=lr, seconds=seconds)
    else:
        if data is not None or lr is not None:
            raise NanstopError("a script brings its own data and learning rate")
        with waiting("trial") as follow:
            found = plan_script(target, dtype=dtype, seconds=seconds, follow=follow)
    if out is not None:
        found.save(out)
    written = f"\nwritten to {out}" if out is not None else ""
    show(found.record, printable(translated(f"{found}{written}")), as_json)
    return OK if found.found else FINDINGS
