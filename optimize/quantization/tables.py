"""Embeddings in INT8 files: rows of 8-bit integers with a scale each, beside layers that multiply in integers.

A table of 30,000 words is half of a small encoder. A look-up multiplies nothing, so its rounding costs no range: about
45 dB at a quarter of the bytes.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.program import Program
from optimize.quantization.blocks import round_to_blocks
from optimize.quantization.weights import reason_for_float

#: Elements from which a table is worth it.
SMALLEST = 2**16
_BITS, _WHOLE_ROW = 8, 0


def round_tables(program: Program, kept: Collection[fx.Node]) -> list[fx.Node]:
    """Round the rows of large embeddings, in place; return the calls whose tables were rounded.

    Left alone: tables of fewer than 65,536 numbers, other than float32 or not finite, computed at run time.

    Args:
        program: A float program.
        kept: Calls that stay in float.
    """
    done = []
    for node in graph.calls(program.graph, aten.embedding.default):
        table = graph.constant(program.graph_module, graph.argument(node, "weight"))
        if node in kept or table is None or reason_for_float(table):
            continue
        if table.dim() == 2 and table.numel() >= SMALLEST and bool(table.isfinite().all()):
            rounded = round_to_blocks(table, _BITS, _WHOLE_ROW)
            graph.replace_weight(program.graph_module, node, "weight", rounded)
            done.append(node)
    if done:  # the program is run before its pass has ended, and a table that two calls share has another path now
        program.graph_module.recompile()
    return done
