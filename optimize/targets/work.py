"""How much work and memory a file may ask for by itself before ``--trust`` is needed; the file alone tells it."""

#: Nodes that are executed, each as often as the loops around it run, and steps of recurrent layers.
MOST_STEPS = 10_000_000
#: Elements of one value of a stated size, and of all that is computed from constants (beyond what is stored).
MOST_ELEMENTS = 2**28
#: What to do about a file that asks for more.
HINT = "Do not open this file, unless you know who made it and why it is so: then add --trust."
