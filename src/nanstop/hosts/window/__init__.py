"""The end of a window: from its reading to an update that is applied, made anew or left out."""
