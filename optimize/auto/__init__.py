"""The search for the best files of a model: what may be tried, what was tried, and what to try next."""

#: What a search without data is told.
NO_DATA = "A search judges files on data, and there is none."
