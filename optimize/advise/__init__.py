"""What would make a model faster: rules that look at it, say what they found, and try the remedy where they can.

One file a family of rules; each is a function that looks, decorated with its name and what its remedy asks for
(``base.rule``), and where it can be tried a function that tries it. What a pass finds is read from its outcome.
"""

from __future__ import annotations

from optimize.advise import execution, guidelines, layout, precision, structure
from optimize.advise.advising import advise
from optimize.advise.base import registered

__all__ = ["advise", "execution", "guidelines", "layout", "precision", "registered", "structure"]
