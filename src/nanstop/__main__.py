"""``python -m nanstop`` and the ``nanstop`` command."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> int:
    """Run the command line and return its exit code. No exception leaves."""
    for stream in (sys.stdout, sys.stderr):
        # A console need not have every letter; whatever stands in for one has its own way.
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:]
    if words[:1] != ["run"] or words[1:2] == [] or words[1].startswith("-"):
        from nanstop import cli

        return cli.main(words)
    # No option of ours stands before a command: there is nothing to read for typer, whose import
    # takes longer than all that has to be done before the command can begin.
    try:
        from nanstop.commands.run.launch import launch
        from nanstop.decide.policy import Policy

        return launch(words[1:], policy=Policy())
    except (Exception, KeyboardInterrupt) as error:
        from nanstop import cli

        return cli.ended(error)


if __name__ == "__main__":
    sys.exit(main())
