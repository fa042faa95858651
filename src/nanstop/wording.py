"""Text made fit for a terminal or a page."""

from __future__ import annotations


def printable(text: str, kept: str = "\n\t") -> str:
    """Return a text with a mark in place of each control character that is not ``kept``, and of
    each that turns the direction of writing: what strangers wrote must not steer a terminal.
    """
    return "".join(each if each.isprintable() or each in kept else "\ufffd" for each in text)
