"""What the graph computes, as algebra: affine operators, scales and shifts, and the thresholds of what is monotone.

`docs/algebra.md` states the laws with their proofs.
"""
