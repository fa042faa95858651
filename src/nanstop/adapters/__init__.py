"""The only place that knows transformers, TRL and raw training loops."""

from pathlib import Path

OWN = str(Path(__file__).parent.parent)
"""Where nanstop's own code lies: its frames are none of the script's."""
