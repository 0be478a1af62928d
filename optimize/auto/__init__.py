"""The search for the best files of a model: what may be tried, what was tried, and what to try next."""
