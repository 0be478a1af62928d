"""Measuring deployed files: each in its own fresh process, one at a time, on the same inputs.

Imports nothing, so that a worker process (``optimize.measure.worker``) costs no more than what it measures.
"""
