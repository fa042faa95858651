"""``python -m nanstop`` and the ``nanstop`` command."""

from __future__ import annotations

import sys

from nanstop.cli import main

if __name__ == "__main__":
    sys.exit(main())
