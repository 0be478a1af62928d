"""Whether a captured model answers as its module does: on its example inputs, one of them, another height and width."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.distances import output_error
from optimize.errors import Refused, VerificationFailed
from optimize.invariants import EXACT_TOLERANCE
from optimize.program import Program

_HINT = (
    "Resample an embedding that has one size, pool to one size before a Linear, or leave --dynamic-size "
    "(dynamic_size=True) out."
)


def vary_tokens(program: Program) -> Program:
    """Return the program with random tokens in place of constant ones, within the smallest table each input reads.

    Passes are verified and files are judged on the example inputs: one token in every place would hide nearly all
    errors.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.randint(0, _vocabulary(program, index), tensor.shape, generator=generator).to(tensor.dtype)
        if not tensor.is_floating_point() and tensor.dtype is not torch.bool and bool((tensor == 0).all())
        else tensor
        for index, tensor in enumerate(program.inputs)
    )
    return dataclasses.replace(program, inputs=inputs)


def _vocabulary(program: Program, index: int) -> int:
    """Return the rows of the smallest embedding that reads an input directly, 1 where none does."""
    placeholder = [node for node in program.graph.nodes if node.op == "placeholder"][index]
    tables = [
        graph.constant(program.graph_module, node.args[0])
        for node in graph.calls(program.graph, graph.aten.embedding.default)
        if node.args[1] is placeholder
    ]
    return min((table.shape[0] for table in tables if table is not None), default=1)


def check_capture(program: Program) -> None:
    """Compare a captured program with the eager module it came from; nothing to do where there is none.

    Raises:
        VerificationFailed: They differ: capture itself would be wrong.
        Refused: They differ for one sample alone, which torch.export takes for any other batch.
    """
    if program.source is None:
        return
    if error := _excess(_expected(program, program.inputs), program.run(program.inputs)):
        raise VerificationFailed(
            f"The captured graph differs from the module by {error:.2e}.",
            hint="The module may compute something new on every call (random numbers, a counter).",
        )
    if program.batch is not None:
        _check_one_sample(program)


def _check_one_sample(program: Program) -> None:
    inputs = program.sample(1)
    try:
        expected = _expected(program, inputs)
    except Exception:  # statistics of a batch, for example, are not taken over one sample
        return
    if _agree(expected, program.run(inputs)):
        return
    if _agree(expected, _expected(program, inputs)):  # a module that counts its calls answers otherwise anyway
        raise Refused(
            "The model computes otherwise with a batch of 1 than with others, so the batch cannot stay free.",
            hint="Fix it (--static-batch 1, dynamic_batch=False), or let the model compute alike for any batch.",
        )


def _agree(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    shapes = zip(expected, found, strict=True)
    return all(want.shape == got.shape for want, got in shapes) and not _excess(expected, found)


def _excess(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """Return the first error of an output that is no mere rounding, 0 where there is none."""
    for want, got in zip(expected, found, strict=True):
        error, scale = output_error(want, got)
        if error > EXACT_TOLERANCE.get(want.dtype, 0.0) * scale:
            return error
    return 0.0


def check_sizes(program: Program) -> None:
    """Run a program whose height and width are free at twice and three times its own, beside its module.

    Raises:
        Refused: It computes with the size of the example; the message names the layer.
    """
    inputs = program.enlarged(program.batch or 1)
    shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    located = _Located(program)
    try:
        with torch.inference_mode():
            found: tuple[torch.Tensor, ...] = located.run(*inputs)
    except Exception as error:
        where = graph.origin(located.reached) if located.reached is not None else ""
        raise Refused(
            f"The model fixes its height or width: '{where}' fails on {shapes}: {str(error).splitlines()[0]}",
            hint=_HINT,
        ) from error
    if _excess(_expected(program, inputs), found):
        raise Refused(f"The captured graph answers differently from the module on {shapes}.", hint=_HINT)


class _Located(fx.Interpreter):
    """Runs a graph and remembers the node it has come to."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.graph_module)
        self.reached: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.reached = n
        return super().run_node(n)


def _expected(program: Program, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    assert program.source is not None
    arguments, keywords = pytree.tree_unflatten(list(inputs), program.in_spec)
    with torch.inference_mode():
        flat, _ = pytree.tree_flatten(program.source(*arguments, **keywords))
    return flat
