"""The one room for child processes: how they are started, what they may do, how they end and how they answer.

`start` starts a process of this package that finds the modules this process finds. `call` runs one function in a child
that is confined first (`confine`): it cannot open a file for writing outside its own folder, reach the network, start
or signal another process, and its memory, time and files are limited. Whatever an untrusted model file makes run, runs
there; the user's process reads nothing of it but data.
"""

from optimize.sandbox.call import Answer, Died, OutOfTime, Unforeseen, call, left_in, own_folder
from optimize.sandbox.confine import ChildLimits, is_confined, is_write_protected
from optimize.sandbox.process import start

__all__ = [
    "Answer",
    "ChildLimits",
    "Died",
    "OutOfTime",
    "Unforeseen",
    "call",
    "is_confined",
    "is_write_protected",
    "left_in",
    "own_folder",
    "start",
]
