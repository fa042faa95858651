"""What tests ask of the installed versions:
a test that needs a newer one is skipped, with its reason.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
from packaging.version import Version

needs_columns = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.11: where in its line an instruction stands"
)


def older_than(package: str, wanted: str) -> bool:
    return Version(version(package)) < Version(wanted)


def needs(package: str, wanted: str, what: str):
    """Return the mark of a test that asks for what ``package`` has had since version ``wanted``."""
    return pytest.mark.skipif(older_than(package, wanted), reason=f"{package} {wanted}: {what}")
