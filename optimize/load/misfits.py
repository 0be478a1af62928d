"""Calls of listed operators whose kernels trust their arguments: what they would look at beyond them, or end with.

A kernel of torch that checks nothing reads or writes past a tensor that is smaller than another one says, and ends the
process over a division that the processor cannot do. Shapes and plain arguments show which calls are sound; of values
that only a run knows, nothing is assumed. A free size fits what fits it whatever it is: where the example's does,
another batch's may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from optimize import graph

#: What free sizes are in one run, by their symbols.
Sizes = Mapping[sympy.Symbol, sympy.Integer]

_OTHER_SIZE = "its weights or statistics have another size than its input has channels"
_OTHER_STATES = "its weights or states have other sizes than its input"
_GATES_OF_LSTM = 4
_GATES_OF_CELL = {"lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}
#: ``at::padding_mode::circular``.
_CIRCULAR = 2
#: Ways of ``grid_sampler`` to find a value between others, and beyond the border.
_MODES = range(3)
#: How many times its input a window may be wide: small maps are pooled in windows that are mostly padding.
_WIDER = 64
#: Divisions of whole numbers, besides those that say how they round.
_DIVIDING = ("remainder", "fmod", "floor_divide")
#: Dimensions that kernels of torch take, and tensors that are multiplied, or of which each gets a dimension.
_MOST_DIMENSIONS = 64
_OF_EACH = ("meshgrid", "cartesian_prod", "chain_matmul", "linalg_multi_dot")


def count_made(node: fx.Node, runs: Sequence[Sizes]) -> float:
    """Return how many tensors a call makes, asked before it does: the parts of a split, else one.

    Infinitely many are what has more dimensions than kernels take, and products of so many matrices.

    Args:
        node: The call; the shapes of what it takes are known.
        runs: The most of these counts.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return float(node.op == "call_function")
    given = {entry.name: graph.argument(node, entry.name) for entry in node.target._schema.arguments}
    together = [given.get(name, ()) for name in ("tensors", "matrices")] if graph.op_name(node) in _OF_EACH else []
    values = [value.meta.get("val") for value in node.all_input_nodes]
    dimensions = [value.dim() for value in values if isinstance(value, torch.Tensor)]
    if max([0, *dimensions, *map(len, together)]) > _MOST_DIMENSIONS:
        return math.inf
    parts = [given.get(name) for name in ("chunks", "sections", "split_size", "split_sizes", "indices")]
    listed = [len(part) for part in parts if isinstance(part, list | tuple)]
    asked = [largest(given[name], runs) for name in ("chunks", "sections") if name in given]
    if graph.op_name(node) == "unbind" or ("split_size" in given and not listed):
        steps = [largest(given.get("split_size", 1), [run]) for run in runs]
        length = _shape(given["self"])[given["dim"]]
        asked += [largest(length, [run]) / max(step, 1) for run, step in zip(runs, steps, strict=True)]
    return max([1, *listed, *asked])


def largest(size: Any, runs: Sequence[Sizes]) -> float:
    """Return the most that a size, or a product of sizes, is in some runs; infinity where only data knows."""
    found = expression(size)
    if isinstance(found, int | float):
        return found
    numbers = [found.xreplace(dict(run)) for run in runs]
    return max((float(number) if number.is_number else math.inf for number in numbers), default=math.inf)


def expression(size: Any) -> Any:
    """Return a size as a number, or as what it is computed by: the symbols of free ones are at least one."""
    found = size.meta["val"] if isinstance(size, fx.Node) else size
    return found if isinstance(found, int | float) else found.node.expr


def find_misfit(node: fx.Node) -> str:
    """Return what is wrong with the arguments of a call whose kernel does not look, empty where nothing is.

    Asked before the call is computed: some kernels run to tell a shape.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    given = {entry.name: graph.argument(node, entry.name) for entry in node.target._schema.arguments}
    return next(filter(None, (check(node, given) for check in _CHECKS)), "")


def _of_normalisation(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Normalisations read and write as many statistics as their input has channels, whatever there are.

    Those that take statistics from the batch write to the ones given, though their schema says that they write to
    nothing.
    """
    if not {"weight", "bias", "momentum"} <= given.keys():
        return ""
    statistics = [given.get("running_mean"), given.get("running_var")]
    writes = any(given.get(name) for name in ("training", "use_input_stats"))
    if writes and any(value is not None for value in statistics):
        return "it writes to its statistics"
    channels = node.all_input_nodes[0].meta["val"].shape[1]
    sized = [given["weight"], given["bias"], *statistics]
    return "" if all(value is None or is_same(_count(value), channels) for value in sized) else _OTHER_SIZE


def _of_weight_norm(node: fx.Node, given: Mapping[str, Any]) -> str:
    """A length for each of the directions; one for all of them (``dim=-1``) is multiplied as any two tensors are."""
    if graph.op_name(node) not in ("_weight_norm", "_weight_norm_interface") or given["dim"] == -1:
        return ""
    return "" if is_same(_count(given["g"]), _shape(given["v"])[given["dim"]]) else _OTHER_SIZE


def _of_kernel(node: fx.Node, given: Mapping[str, Any]) -> str:
    """A convolution that is told the size of its kernel reads that much of its weight."""
    if "kernel_size" not in given or "weight" not in given:
        return ""
    told, there = given["kernel_size"], _shape(given["weight"])[2:]
    return "" if _alike(told, there) else "its kernel has another size than its weight"


def _of_recurrence(node: fx.Node, given: Mapping[str, Any]) -> str:
    """oneDNN reads the weights, biases and cells of an LSTM by the sizes of its input and its first state."""
    if graph.op_name(node) != "lstm" or "batch_sizes" in given:
        return ""
    if len(given["hx"]) != 2:
        return "it has no state and cell"
    (held, batch, shown), (*_, hidden) = _shape(given["hx"][0]), _shape(given["hx"][1])
    each = _GATES_OF_LSTM if given["has_biases"] else _GATES_OF_LSTM // 2
    each += not is_same(shown, hidden)  # what is shown of the cell is a projection of it
    directions = 2 if given["bidirectional"] else 1
    layers, rows, features = directions * given["num_layers"], _GATES_OF_LSTM * hidden, _shape(given["input"])[2]
    wanted, found = [(layers, batch, hidden)], [_shape(given["hx"][1])]
    for place in range(layers):
        taken = features if place < directions else directions * shown
        biases = [(rows,), (rows,)] if given["has_biases"] else []
        wanted += [(rows, taken), (rows, shown), *biases, (shown, hidden)][:each]
    found += [_shape(value) for value in given["params"]]
    fits = is_same(held, layers) and is_same(batch, _shape(given["input"])[0 if given["batch_first"] else 1])
    fits = fits and len(wanted) == len(found) and all(map(_alike, wanted, found))
    return "" if fits else _OTHER_STATES


def _of_cells(node: fx.Node, given: Mapping[str, Any]) -> str:
    """A cell takes what it makes of its input and its state apart into gates, of whatever shape they are."""
    gates = _GATES_OF_CELL.get(graph.op_name(node))
    if gates is None:
        return ""
    states = given["hx"] if isinstance(given["hx"], list | tuple) else [given["hx"]]
    (batch, features), (_, hidden) = _shape(given["input"]), _shape(states[0])
    wanted = [(batch, hidden)] * len(states) + [(gates * hidden, features), (gates * hidden, hidden)]
    found = [_shape(value) for value in (*states, given["w_ih"], given["w_hh"])]
    biases = [_shape(given[name]) for name in ("b_ih", "b_hh") if given[name] is not None]
    fits = all(map(_alike, [*wanted, *[(gates * hidden,)] * len(biases)], [*found, *biases]))
    return "" if fits else _OTHER_STATES


def _of_resampling(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Resampling walks through its input in steps of the scale it is told, to as many places as it is told."""
    scales = [given[name] for name in ("scales", "scales_d", "scales_h", "scales_w") if name in given]
    if not scales or not given.get("output_size"):
        return ""
    sizes = _shape(node.all_input_nodes[0])[2:]
    known = zip(sizes, given["output_size"], scales[-len(sizes) :], strict=False)
    fits = all(scale is None or _is_less(wanted, size, scale) for size, wanted, scale in known)
    return "" if fits else "its output is larger than its scale makes it"


def _of_bags(node: fx.Node, given: Mapping[str, Any]) -> str:
    """The bags of an embedding begin where its offsets say, which are looked at in the first and last place alone."""
    if "offsets" not in given:
        return ""
    if not isinstance(given["offsets"].target, torch._ops.OpOverload) or not _rises(given["offsets"]):
        return "its offsets are not counted, and may lead anywhere"
    table, indices, offsets = (_shape(given[name]) for name in ("weight", "indices", "offsets"))
    fits = (len(table), len(indices), len(offsets)) == (2, 1, 1)
    least = 2 if given.get("include_last_offset") else 1
    return "" if fits and _is_least(expression(offsets[0]), least) else "it has no bags, or is no table"


def _of_division(node: fx.Node, given: Mapping[str, Any]) -> str:
    """The processor ends who divides by zero, or the smallest integer by minus one; some runtimes leave that to it.

    Of torch ``trunc`` does; ONNX Runtime does for every remainder.
    """
    if given.get("rounding_mode") is None and graph.op_name(node) not in _DIVIDING:
        return ""
    divisor = given.get("other")
    divided = [value.meta["val"] for value in node.all_input_nodes]
    real = any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in divided)
    if real or isinstance(divisor, float):
        return ""
    if isinstance(divisor, fx.Node) and divisor.op == "get_attr":
        held = graph.attribute(node.graph.owning_module, str(divisor.target))  # type: ignore[arg-type]
        with _disable_current_modes():  # shapes alone are computed meanwhile
            positive = bool((held > 0).all())
        return "" if positive else "it divides integers by some that are not positive"
    return "" if isinstance(divisor, int) and divisor not in (0, -1) else "it divides integers by what may be minus one"


def _of_circle(node: fx.Node, given: Mapping[str, Any]) -> str:
    """What is padded in a circle and cut at once is left as memory was found."""
    is_circular = graph.op_name(node) == "_pad_circular" or given.get("mode") in ("circular", _CIRCULAR)
    cuts = is_circular and any(isinstance(size, int) and size < 0 for size in given.get("pad", ()))
    return "it pads in a circle and cuts" if cuts else ""


def _of_grid(node: fx.Node, given: Mapping[str, Any]) -> str:
    """In a mode that it does not know, sampling writes nothing: its output is left as memory was found."""
    modes = [given[name] for name in ("interpolation_mode", "padding_mode") if name in given]
    return "" if all(mode in _MODES for mode in modes) else "it samples in a mode that there is not"


def _of_window(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Pooling walks through all of its window, of which padding lets half lie outside of the input."""
    if "pool" not in graph.op_name(node) or not given.get("kernel_size"):
        return ""
    sizes = [1, *map(expression, _shape(given["self"])[1:])]
    fits = all(
        any(_is_least(_WIDER * size - expression(kernel), 0) for size in sizes) for kernel in given["kernel_size"]
    )
    return "" if fits else "its window is far wider than its input"


def _of_attention(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Attention reads as many keys as there are values, and the fused kernel those of every sample and head.

    The fused one divides by the number of queries, too, and shared keys by the number of their heads.
    """
    if not {"query", "key", "value"} <= given.keys() or "embed_dim" in given:
        return ""
    query, key, value = (_shape(given[name]) for name in ("query", "key", "value"))
    fused = "flash" in graph.op_name(node)
    heads = [each[:-2] for each in (query, key, value)]
    if given.get("enable_gqa") and not all(_is_least(expression(each[-3]), 1) for each in (key, value)):
        return "its keys have no heads"
    whole = _alike(*heads[:2]) and _alike(*heads[1:]) and _is_least(expression(query[-2]), 1)
    return "" if is_same(key[-2], value[-2]) and (whole or not fused) else "its keys and values are not as many"


def _of_heads(node: fx.Node, given: Mapping[str, Any]) -> str:
    """The processor ends who divides by no heads."""
    heads = given.get("num_head", given.get("num_heads", 1))
    return "" if isinstance(heads, int) and heads > 0 else "its heads are not counted"


def _of_transform(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Kernels of Fourier transforms count dimensions from the first, and take as many values as they are told."""
    if not graph.op_name(node).startswith("_fft_"):
        return ""
    sizes, dims = _shape(given["self"]), given["dim"]
    counted = all(isinstance(dim, int) and 0 <= dim < len(sizes) for dim in dims)
    if not counted or not 0 < len(set(dims)) == len(dims) or given["normalization"] not in _MODES:
        return "its dimensions are not counted from the first"
    last = given.get("last_dim_size")
    fits = last is None or (isinstance(last, int) and last > 0 and is_same(sizes[dims[-1]], last // 2 + 1))
    return "" if fits else "it is told another size than its input has"


def _of_distances(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Distances of rows to one another are those of a table."""
    is_table = graph.op_name(node) != "_pdist_forward" or len(_shape(given["self"])) == 2
    return "" if is_table else "it takes the distances of what is no table"


def _of_types(node: fx.Node, given: Mapping[str, Any]) -> str:
    """Whole attention blocks and LSTMs read their weights as numbers of the type that the first tensor has."""
    if graph.op_name(node) not in ("lstm", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        return ""
    held = [*given.get("params", ()), *given.get("hx", ())]
    held += [value for name, value in given.items() if "weight" in name or "bias" in name]
    types = {value.meta["val"].dtype for value in held if isinstance(value, fx.Node)}
    fits = types <= {node.all_input_nodes[0].meta["val"].dtype}
    return "" if fits else "its weights have another type than its input"


_CHECKS: Sequence[Callable[[fx.Node, Mapping[str, Any]], str]] = (
    _of_normalisation, _of_weight_norm, _of_kernel, _of_recurrence, _of_cells, _of_resampling, _of_bags, _of_division,
    _of_circle, _of_grid, _of_window, _of_attention, _of_heads, _of_transform, _of_distances, _of_types,
)  # fmt: skip


def _rises(node: fx.Node) -> bool:
    """Say whether a call counts upwards from zero or more, in integers that do not wrap on the way."""
    given = {name: graph.argument(node, name) for name in ("start", "step", "dtype") if graph.has_argument(node, name)}
    start, step = given.get("start", 0), given.get("step", 1)
    counts = isinstance(start, int) and isinstance(step, int) and start >= 0 and step > 0
    return graph.op_name(node) == "arange" and counts and given.get("dtype") in (None, torch.int64)


def _shape(value: fx.Node) -> Sequence[Any]:
    return value.meta["val"].shape


def _count(value: fx.Node) -> Any:
    return math.prod(_shape(value))


def is_same(one: Any, two: Any) -> bool:
    """Say whether two sizes are one whatever the free ones are."""
    return bool(sympy.expand(expression(one)) == sympy.expand(expression(two)))


def _alike(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Say whether two shapes are."""
    return len(one) == len(two) and all(map(is_same, one, two))


def _is_least(size: Any, least: int) -> bool:
    """Say whether an expression is never less than a number, as far as its signs show."""
    return bool((sympy.expand(size) - least).is_nonnegative)


def _is_less(wanted: Any, size: Any, scale: float) -> bool:
    """Say whether an output has a place less than one beyond its input times a scale."""
    beyond = sympy.expand(expression(wanted) - expression(size) * sympy.Rational(scale))
    return bool(beyond.is_number and beyond < 1)
