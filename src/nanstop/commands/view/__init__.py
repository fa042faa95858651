"""``nanstop view``: a local page that follows runs."""
