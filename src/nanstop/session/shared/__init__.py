"""One failure of several processes: who looks into it, and what all of them do about it."""
