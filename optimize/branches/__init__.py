"""Trainable parallel branches for the convolutions of any model, and the way back to the model it was.

Branches help while a network is trained and cost nothing afterwards: their sum is one convolution. ``layers`` are the
modules, ``kinds`` says which branches a kind has and where each fits, ``insertion`` puts them into a model;
``optimize.passes.merging`` takes them out again, by the algebra of ``Reparameterize``.
"""

from __future__ import annotations

from optimize.branches.insertion import explain_branches, insert_branches
from optimize.branches.layers import Branches

__all__ = ["Branches", "explain_branches", "insert_branches"]
