"""What would make a model faster: rules that look at it, say what they found, and try the remedy where they can.

One file a family of rules; each rule is a small class that registers itself (``base.register_rule``).
"""

from __future__ import annotations

from optimize.advise import elementwise, execution, guidelines, layout, loading, precision, structure
from optimize.advise.advising import Advised, advise
from optimize.advise.base import Advice, Case, Finding, Host, Rule, register_rule, registered

__all__ = [
    "Advice",
    "Advised",
    "Case",
    "Finding",
    "Host",
    "Rule",
    "advise",
    "elementwise",
    "execution",
    "guidelines",
    "layout",
    "loading",
    "precision",
    "register_rule",
    "registered",
    "structure",
]
