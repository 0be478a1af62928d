"""The gate: is the candidate slower, larger or less accurate than the base, and how sure is that?

``rounds`` is what is recorded, ``verdict`` what follows from it and the statistics of that, ``case`` one pair of models
from its files to its verdict, ``suite`` several of them, ``limits`` what is asked, ``record`` what is reported.
"""
