"""Which language is asked for: by an option, by a variable, or by the locale."""

from __future__ import annotations

import os

LANGUAGES = ("en", "zh")
VARIABLE = "NANSTOP_LANG"
"""Names the language, for this process and those that it starts; the locale does where it is not
set.
"""
_LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")


def language() -> str:
    """Return the language to speak: English where none is asked for that nanstop has."""
    asked = os.environ.get(VARIABLE) or next(
        (os.environ[name] for name in _LOCALE if os.environ.get(name)), ""
    )
    asked = asked[:2].lower()
    return asked if asked in LANGUAGES else LANGUAGES[0]
