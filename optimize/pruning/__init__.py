"""Structured pruning: which channels hang together, which matter least, and how they are cut."""
