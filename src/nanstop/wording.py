"""Text made fit for a terminal or a page."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with a mark in place of each control character, and of each that turns the
    direction of writing: what strangers wrote must not steer a terminal.
    """
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
