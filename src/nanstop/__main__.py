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
    plain = len(words) > 1 and not words[1].startswith("-")
    # Where no option of ours stands there is nothing to read for typer, whose import takes longer
    # than all that has to be done before a command can begin.
    try:
        if plain and words[0] == "run":
            from nanstop.commands.run.launch import launch
            from nanstop.decide.policy import Policy

            return launch(words[1:], policy=Policy())
        if plain and words[0] == "explain" and len(words) == 2:
            from nanstop.commands.explain.page import print_page

            print_page(words[1])
            return 0
    except (Exception, KeyboardInterrupt) as error:
        from nanstop import cli

        return cli.ended(error)
    from nanstop import cli

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
