"""Products with a constant matrix, written as the linear layers that they are, so that passes know one form.

``x @ W + b``, GPT-2's ``addmm``, ``einsum("bld,dhk->blhk", x, W)``, the rows that decomposed graphs make of a value,
and the batched products that torch makes of one that does not lie in one piece.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any, cast

from torch import fx

from optimize import graph, ops
from optimize.graph import aten

_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default)
#: What transposes a matrix, by which arguments.
_TURNED = (aten.t.default, *ops.TRANSPOSES)
_TURNS = ((), ([1, 0],), (0, 1), (1, 0), (-2, -1), (-1, -2))


def as_linear(module: fx.GraphModule, node: fx.Node) -> None:
    """Write a call as the linear layer that it is, alone or with one before it; leave any other call as it is.

    Args:
        module: The graph's owner.
        node: A call with all its arguments, after those that it reads.
    """
    if node.target in _PRODUCTS:
        _write_product(module, node)
    elif graph.is_call(node, aten.einsum.default):
        _write_einsum(module, node)
    elif graph.is_call(node, aten.reshape.default):
        _join_rows(node)
    elif graph.is_call(node, aten.add.Tensor) and graph.argument(node, "alpha") == 1:
        _join_bias(node)


def _write_product(module: fx.GraphModule, node: fx.Node) -> None:
    """Write a product with a constant matrix, to which ``addmm`` adds a constant."""
    *added, source, matrix = (cast(fx.Node, each) for each in node.args)
    if added and not (_is_bias(added[0], node) and graph.argument(node, "alpha") == graph.argument(node, "beta") == 1):
        return
    if graph.is_call(matrix, aten.expand.default):  # one for all samples
        matrix = cast(fx.Node, matrix.args[0])
    kept = [str(each.meta["val"].shape[:-1]) for each in (source, node)]
    shape = str([*source.meta["val"].shape[-1:], *node.meta["val"].shape[-1:]])
    is_one = _is_matrix(matrix) and kept[0] == kept[1] and str([*matrix.meta["val"].shape]) == shape
    if not (is_one and graph.weights_behind(matrix)) or graph.weights_behind(source):  # of weights alone: no layer
        return
    if graph.is_call(matrix, *_TURNED) and matrix.args[1:] in _TURNS:
        weight = cast(fx.Node, matrix.args[0])
    elif graph.is_call(matrix.next, aten.permute.default) and matrix.next.args == (matrix, [1, 0]):
        weight = matrix.next  # that of another layer
    else:
        with module.graph.inserting_after(matrix):
            weight = graph.call_like(node, aten.permute.default, matrix, [1, 0])
    bias = added[0] if added else None
    node.target, node.args, node.kwargs = aten.linear.default, (source, weight, bias), {}


def _write_einsum(module: fx.GraphModule, node: fx.Node) -> None:
    """Write sums of products with a constant, over axes that both have and the result has not."""
    terms, _, result = str(node.args[0]).replace(" ", "").partition("->")
    operands = sorted(
        zip(terms.split(","), cast(list[fx.Node], node.args[1]), strict=True),
        key=lambda operand: bool(graph.weights_behind(operand[1])),
    )
    if len(operands) != 2 or [bool(graph.weights_behind(each)) for _, each in operands] != [False, True]:
        return
    (read, value), (held, weight) = operands
    free = "".join(axis for axis in string.ascii_letters if axis not in terms)
    every = free[: value.meta["val"].dim() - len(read.replace("...", ""))]  # what dots stand for
    read, result = read.replace("...", every), result.replace("...", every)
    if any(len({*axes}) != each.meta["val"].dim() for axes, each in ((read, value), (held, weight))):
        return  # a diagonal, or dots of the weight
    summed = [axis for axis in read if axis in held and axis not in result]
    kept, made = ([axis for axis in axes if axis not in summed] for axes in (read, held))
    one, other = (
        {axis: size if isinstance(size, int) else -1 for axis, size in zip(axes, each.meta["val"].shape, strict=True)}
        for axes, each in ((read, value), (held, weight))
    )
    is_apart = summed and sorted([*kept, *made]) == sorted(result) and len({*kept, *made}) == len(result)
    is_float = node.meta["val"].is_floating_point() and all(one[axis] == other[axis] for axis in summed)
    if not (is_apart and is_float and [one[axis] for axis in kept].count(-1) <= 1):
        return

    def turned(source: fx.Node, axes: Sequence[str], wanted: Sequence[str]) -> fx.Node:
        order = [axes.index(axis) for axis in wanted]
        return source if order == sorted(order) else graph.call_like(node, aten.permute.default, source, order)

    def shaped(source: fx.Node, *shape: int) -> fx.Node:
        is_shaped = source.meta["val"].dim() == len(shape)
        return source if is_shaped else graph.call_like(node, aten.reshape.default, source, [*shape])

    with module.graph.inserting_before(node):
        length = math.prod(one[axis] for axis in summed)
        value = shaped(turned(value, read, [*kept, *summed]), *(one[axis] for axis in kept), length)
        weight = shaped(turned(weight, held, [*made, *summed]), math.prod(other[axis] for axis in made), length)
        found = graph.call_like(node, aten.linear.default, value, weight, None)
        found = shaped(found, *(one[axis] for axis in kept), *(other[axis] for axis in made))
        found = turned(found, [*kept, *made], result)
    node.replace_all_uses_with(found)
    module.graph.erase_node(node)


def _join_rows(node: fx.Node) -> None:
    """Let a linear layer on the rows of a value, which get dimensions back, read the value in those dimensions."""
    layer = cast(fx.Node, node.args[0])
    rows = layer.args[0] if _is_layer(layer) else None
    if not isinstance(rows, fx.Node) or not graph.is_call(rows, aten.reshape.default):
        return
    source = cast(fx.Node, rows.args[0])
    before, read, made, after = (each.meta["val"].shape for each in (source, rows, layer, node))
    if str([before[:-1], before[-1], made[-1]]) == str([after[:-1], read[-1], after[-1]]):
        _become(node, layer, source, *layer.args[1:])
    elif str([len(read), made[-1]]) == str([2, after[-1]]):  # heads, which torch's own attention makes rows of
        sizes = [*cast(list[Any], node.args[1])[:-1], read[-1]]
        with node.graph.inserting_before(node):
            _become(node, layer, graph.call_like(rows, aten.reshape.default, source, sizes), *layer.args[1:])


def _join_bias(node: fx.Node) -> None:
    """Let a constant that is added to a linear layer without a bias be its bias."""
    first, second = cast(tuple[Any, Any], node.args[:2])
    layer, bias = (first, second) if _is_layer(first) else (second, first)
    if _is_layer(layer) and layer.args[2] is None and graph.same_form(layer, node) and _is_bias(bias, node):
        _become(node, layer, *layer.args[:2], bias)


def _become(node: fx.Node, layer: fx.Node, *arguments: Any) -> None:
    node.target, node.args, node.kwargs = layer.target, arguments, {}
    node.meta = {**layer.meta, "val": node.meta["val"]}


def _is_layer(node: Any) -> bool:
    """Say whether a value is that of a linear layer with a matrix, and read once."""
    return graph.is_call(node, aten.linear.default) and len(node.users) == 1 and _is_matrix(node.args[1])


def _is_matrix(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.dim() == 2 and value.is_floating_point())


def _is_bias(node: Any, result: fx.Node) -> bool:
    """Say whether a value is a constant with a number for each place of a result's last axis."""
    if not isinstance(node, fx.Node) or not graph.weights_behind(node):
        return False
    one, many = node.meta["val"], result.meta["val"]
    return one.dtype is many.dtype and str(one.shape) == str(many.shape[-1:])
