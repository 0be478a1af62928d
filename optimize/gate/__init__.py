"""The gate: is the candidate slower, larger or less accurate than the base, and how sure is that?

``evidence`` is the statistics, ``clock`` which clock decides, ``rounds`` what is recorded, ``lockstep`` how it is
measured, ``verdict`` what follows from it, ``case`` one pair of models from its files to its verdict, ``suite``
several of them, ``limits`` what is asked, ``record`` what is reported.
"""
