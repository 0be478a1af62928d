"""The normal form of a graph: one way to write each thing, so that passes are short.

Every argument written out in schema order, one BatchNorm operator (``aten.batch_norm``), convolutions by their number
of dimensions, integer paddings, linear layers for products with a constant matrix (``products.py``), one call for
attention that is written out (``attention.py``) and for what torch decomposes a layer into, ``reshape`` for ``view``
where it changes a shape, slices for the parts of a split weight and of an axis that was split, an embedding and its
reduction for bags of one size, nothing that is looked up by counting (``counting.py``), sizes computed in whole
numbers, no clones or copies (but where strides are read), no assertions, no updates of buffers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from optimize import attention, counting, graph, ops, products
from optimize.graph import aten

_IDENTITIES = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
)
#: Those that may lay a value out anew in memory, and calls whose answer depends on how it lies there.
_COPIES = (aten.clone.default, aten.contiguous.default)
_STRIDED = (aten.as_strided.default, aten.view_as_complex.default, aten.view.dtype)
_ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
_BATCH_NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)
_POOLS = (*ops.MAX_POOLS, *ops.AVERAGE_POOLS)
_SAME_CONVOLUTIONS = (aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, aten._convolution_mode.default)
#: What traced TorchScript and decomposed graphs call, whatever the number of dimensions.
_ANY_CONVOLUTIONS = (aten.convolution.default, aten._convolution.default, aten._convolution.deprecated)
#: What torch decomposes layers into, with the layers, and what it calls their arguments.
_DECOMPOSED: dict[Any, torch._ops.OpOverload] = {
    aten._adaptive_avg_pool2d.default: aten.adaptive_avg_pool2d.default,
    aten._log_softmax.default: aten.log_softmax.int,
    aten._softmax.default: aten.softmax.int,
    aten.max_pool2d_with_indices.default: aten.max_pool2d.default,
    aten.native_group_norm.default: aten.group_norm.default,
    aten.native_layer_norm.default: aten.layer_norm.default,
}
_RENAMED = {"num_groups": "group"}
_RESIZED = (
    aten.expand.default, aten.reshape.default, aten.slice.Tensor, aten.view.default, aten._unsafe_view.default,
)  # fmt: skip
#: The forms of bags of embeddings, and what reduces one, at the place of its mode.
_BAGS = (aten.embedding_bag.padding_idx, aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)
#: Operators made of others whose result is always a new one.
_NEW = (*_SAME_CONVOLUTIONS, *ops.CONVOLUTIONS, aten.linear.default, aten.batch_norm.default)
#: Operators made of others that torch's functionalization leaves as they are, or that are written here as it would.
_SETTLED = (
    *_IDENTITIES, *_SAME_CONVOLUTIONS, *ops.WEIGHTED, *ops.RECURRENT, *ops.CLIPS, *ops.PADS,
    aten.adaptive_avg_pool2d.default, aten.group_norm.default, aten.index.Tensor, aten.layer_norm.default,
    aten.matmul.default, aten.max_pool2d.default, aten.reshape.default, aten.scaled_dot_product_attention.default,
    aten.softmax.int, aten.sym_size.int, aten.upsample_bilinear2d.vec, aten.upsample_nearest2d.vec,
    operator.add, operator.floordiv, operator.getitem, operator.mul, operator.sub,
)  # fmt: skip


#: Operators whose forms that overwrite their input take the same arguments and return the same numbers.
_OVERWRITING = (
    *ops.SUMS, *ops.CLIPS, aten.div.Tensor, aten.gelu.default, aten.hardsigmoid.default, aten.hardswish.default,
    aten.leaky_relu.default, aten.mul.Tensor, aten.sigmoid.default, aten.silu.default, aten.tanh.default,
)  # fmt: skip


def normalize(module: fx.GraphModule) -> None:
    """Bring the graph into the normal form (module docstring)."""
    reads_strides = any(graph.calls(module.graph, *_STRIDED))
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _ASSERTIONS or node.target is aten.copy_.default:
            module.graph.erase_node(node)
        elif node.target in _IDENTITIES and not (reads_strides and node.target in _COPIES):
            node.replace_all_uses_with(cast(fx.Node, node.args[0]))
            module.graph.erase_node(node)
        else:
            _normalize_call(module, node)
            products.as_linear(module, node)
            attention.as_attention(node)
            attention.take_apart(node)
    counting.simplify(module)


def write_out_of_place(flow: fx.Graph) -> None:
    """Let calls that overwrite the result of another call return a new value, where that is one and the same.

    ``relu_(x)`` becomes ``relu(x)``, and all that reads ``x`` afterwards reads that. Where ``x`` shares its memory with
    another value, is an input or a weight, the call is left to torch's functionalization, which would do the same for
    all of them in several times the time.
    """
    places = {node: place for place, node in enumerate(flow.nodes)}
    for node in list(flow.nodes):
        drops = graph.is_call(node, aten.dropout.default, aten.dropout_.default)
        if drops and not (graph.argument(node, "train") and graph.argument(node, "p")):
            node.replace_all_uses_with(cast(fx.Node, node.args[0]))  # torch's functionalization makes it a copy
            flow.erase_node(node)
            continue
        plain = _out_of_place(node)
        overwritten = node.args[0] if plain is not None and node.args else None
        if not isinstance(overwritten, fx.Node) or _shares_memory(overwritten):
            continue
        readers = [user for user in overwritten.users if user is not node]
        if not any(_shares_memory(user) for user in readers if places[user] < places[node]):
            node.target = plain
            later = {user for user in readers if places[user] > places[node]}
            overwritten.replace_all_uses_with(node, delete_user_cb=later.__contains__)


def _out_of_place(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the operator that computes what an overwriting one writes, None where none is known.

    What is overwritten keeps its dtype, a new value has the widest of the operands'.
    """
    if not (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"):
        return None
    name = node.target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    plain = getattr(getattr(aten, name[:-1], None), node.target._overloadname, None)
    values = [each.meta.get("val") for each in node.all_input_nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return plain if plain in _OVERWRITING and len(dtypes) == 1 else None


def _shares_memory(node: fx.Node) -> bool:
    """Say whether a value may share its memory with another: it is given, or an operator may return what it was given.

    A view says so in its schema; an operator made of others (dropout, where there is nothing to drop) need not.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    schema = node.target._schema
    is_view = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    return is_view or (_is_made_of_others(node.target) and node.target not in _NEW)


def _is_made_of_others(target: torch._ops.OpOverload) -> bool:
    return target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def is_settled(flow: fx.Graph) -> bool:
    """Say whether torch's functionalization would change nothing of a graph but what :func:`normalize` writes itself.

    It traces the graph anew, which takes as long as exporting it did.
    """
    return all(_is_settled(node) for node in flow.nodes if node.op == "call_function")


def _is_settled(call: fx.Node) -> bool:
    if graph.is_call(call, aten.batch_norm.default):
        return not graph.argument(call, "training")
    if graph.is_call(call, aten.flatten.using_ints):
        fixed = [size for size in call.meta["val"].shape if isinstance(size, int)]
        return call.meta["val"].dim() - len(fixed) <= 1 and 0 not in fixed
    return call.target in _SETTLED or (isinstance(call.target, torch._ops.OpOverload) and _is_one(call.target))


@functools.cache
def _is_one(target: torch._ops.OpOverload) -> bool:
    """Say whether an operator is made of no others, overwrites nothing, and has a result whose shape is known."""
    is_open = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*target.tags}
    return target.namespace == "aten" and not (target._schema.is_mutable or _is_made_of_others(target) or is_open)


def _normalize_call(module: fx.GraphModule, node: fx.Node) -> None:
    graph.normalize_arguments(node)
    if graph.is_call(node, aten.batch_norm.default):
        node.args = (*node.args[:6], 0.0, node.args[7], False)
    elif graph.is_call(node, aten.flatten.using_ints):
        sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
        node.target, node.args = aten.reshape.default, (node.args[0], sizes)
    elif node.target in _BATCH_NORMS:
        _normalize_batch_norm(module, node)
    elif node.target in ops.AVERAGE_POOLS[1:] and graph.argument(node, "divisor_override"):
        _normalize_divisor(module, node)
    elif node.target in _POOLS and graph.argument(node, "ceil_mode"):
        _normalize_pool(module, node)
    elif node.target in _SAME_CONVOLUTIONS:
        _normalize_same_padding(module, node)
    elif node.target in _ANY_CONVOLUTIONS:
        _normalize_convolution(node)
    elif graph.is_call(node, aten.copy.default) and graph.same_form(node, cast(fx.Node, node.args[1])):
        node.replace_all_uses_with(cast(fx.Node, node.args[1]))
        module.graph.erase_node(node)
    elif node.target in _RESIZED and graph.same_form(node, cast(fx.Node, node.args[0])) and not _is_mask(node):
        node.replace_all_uses_with(cast(fx.Node, node.args[0]))
        module.graph.erase_node(node)
    elif graph.is_call(node, aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default
        _normalize_heads(module, node)
    elif node.target in _DECOMPOSED:
        _normalize_decomposed(module, node)
    elif node.target is operator.getitem:
        _normalize_part(module, node)
        _normalize_taken(node)
    elif graph.is_call(node, aten.select.int):
        _normalize_taken(node)
    elif node.target in (operator.abs, math.ceil, math.floor):
        _normalize_size(module, node)
    elif node.target in _BAGS:
        _normalize_bags(module, node)
    elif graph.is_call(node, aten.amax.default, aten.amin.default) and not node.args[1]:
        node.update_arg(1, [*range(cast(fx.Node, node.args[0]).meta["val"].dim())])
    if "pin_memory" in node.kwargs:
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "pin_memory"}


def _is_mask(node: fx.Node) -> bool:
    """Say whether a value is of truths: ``counting.py`` reads off its readers how large it is to be."""
    return node.meta["val"].dtype is torch.bool


def _normalize_size(module: fx.GraphModule, node: fx.Node) -> None:
    """Write a rounded quotient of sizes by whole numbers, and a size without its sign by the larger of two.

    Files of torch have no word for the functions of ``math`` that do so: ``ceil(a / b)`` is ``-(-a // b)``.
    """
    (value,), call = node.args, functools.partial(graph.call_like, node)
    parts = value.args if isinstance(value, fx.Node) and value.target is operator.truediv else ()
    kinds = [type(each.meta["val"] if isinstance(each, fx.Node) else each) for each in parts]
    if node.target is not operator.abs and not (kinds and {*kinds} <= {int, torch.SymInt}):
        return
    with module.graph.inserting_before(node):
        if node.target is operator.abs:
            found = call(torch.sym_max, value, call(operator.neg, value))
        elif node.target is math.floor:
            found = call(operator.floordiv, *parts)
        else:
            found = call(operator.neg, call(operator.floordiv, call(operator.neg, parts[0]), parts[1]))
    node.replace_all_uses_with(found)
    module.graph.erase_node(node)


def _normalize_part(module: fx.GraphModule, node: fx.Node) -> None:
    """Write a part of a split weight, and one whose size is computed, as a slice.

    Attention packs its projections so, which are then constants like any other; runtimes split by numbers alone.
    """
    source, index = cast(tuple[fx.Node, int], node.args)
    if not graph.is_call(source, aten.split.Tensor, aten.split_with_sizes.default):
        return
    split, dim, size = cast(fx.Node, source.args[0]), cast(int, graph.argument(source, "dim")), source.args[1]
    if split.op == "get_attr":
        ends: list[Any] = [0, *itertools.accumulate(part.shape[dim] for part in source.meta["val"])]
    elif isinstance(size, fx.Node):
        with module.graph.inserting_before(node):
            ends = [0, size, *(graph.call_like(node, operator.mul, size, place) for place in range(2, index + 2))]
    else:
        return
    node.target, node.args = aten.slice.Tensor, (split, dim, ends[index], ends[index + 1], 1)


def _normalize_taken(node: fx.Node) -> None:
    """Write one place of an axis that the last one was split into as the slice of the last one that it is.

    Torch's own attention packs queries, keys and values in one product ``[T, N, 3 C]``, and takes them out of it as
    ``[T, N, 3, C]``, ``[3, T, N, C]``.
    """
    taker = cast(fx.Node, node.args[0]) if node.target is operator.getitem else node
    index = node.args[-1]
    if not graph.is_call(taker, aten.select.int, aten.unbind.int) or not isinstance(index, int):
        return
    value = cast(fx.Node, taker.args[0])
    axes: list[int | None] = list(range(value.meta["val"].dim()))
    axes.append(axes.pop(cast(int, graph.argument(taker, "dim"))))  # here the one that is taken comes last
    while graph.is_call(value, *ops.TRANSPOSES, aten.squeeze.dim, aten.unsqueeze.default):
        order = _axes_of(value)
        axes, value = [None if axis is None else order[axis] for axis in axes], cast(fx.Node, value.args[0])
    if not graph.is_call(value, aten.reshape.default):
        return
    split = cast(fx.Node, value.args[0])
    before, after = ([*each.meta["val"].shape] for each in (split, value))
    last = len(before) - 1
    is_last = axes == [*range(last), last + 1, last] and str(before[:-1]) == str(after[:-2])
    if is_last and all(isinstance(size, int) for size in after[-2:]):
        count, width = after[-2:]
        start = index % count * width
        node.target, node.args = aten.slice.Tensor, (split, last, start, start + width, 1)


def _axes_of(move: fx.Node) -> list[int | None]:
    """Return the axis of its input that each axis of what a call moves was, None of a new one."""
    dims, axis = cast(fx.Node, move.args[0]).meta["val"].dim(), cast(int, move.args[1])
    if graph.is_call(move, *ops.TRANSPOSES):
        return [*graph.order_of(move, dims)]
    order: list[int | None] = list(range(dims))
    if graph.is_call(move, aten.unsqueeze.default):
        order.insert(axis % (dims + 1), None)
    elif move.meta["val"].dim() < dims:
        order.pop(axis)
    return order


def _normalize_heads(module: fx.GraphModule, node: fx.Node) -> None:
    """Write heads of torch's own attention without the batch between: ``[T, N, C]`` is split and permuted, no more.

    It goes ``[T, N, C]``, ``[T, N * H, D]``, ``[N * H, T, D]``, ``[N, H, T, D]``.
    """
    turned = cast(fx.Node, node.args[0])
    if not graph.is_call(turned, aten.transpose.int) or turned.args[1:] != (0, 1):
        return
    joined = cast(fx.Node, turned.args[0])
    if not graph.is_call(joined, aten.reshape.default):
        return
    source, shape, sizes = cast(fx.Node, joined.args[0]), cast(list[Any], joined.args[1]), node.args[1]
    before, between, after = (each.meta["val"].shape for each in (source, joined, node))
    if [*map(len, (before, between, after))] != [3, 3, 4]:
        return
    if str([*before[:2], between[0], between[2]]) != str([after[2], after[0], before[0], after[3]]):
        return
    samples, heads, _, width = cast(list[Any], sizes)
    if [shape[0], samples, heads, width].count(-1) > 1:
        return
    with module.graph.inserting_before(node):
        split = graph.call_like(joined, aten.reshape.default, source, [shape[0], samples, heads, width])
    node.target, node.args = aten.permute.default, (split, [1, 2, 0, 3])


def _normalize_bags(module: fx.GraphModule, node: fx.Node) -> None:
    """Write bags that all have the size of a row, as ``[N, size]`` ids give them, as embeddings and their reduction.

    Runtimes have no bags of any size: an exporter writes a loop over the samples.
    """
    ids, starts = (cast(fx.Node, graph.argument(node, name)) for name in ("indices", "offsets"))
    if not (graph.is_call(ids, aten.reshape.default) and graph.is_call(starts, aten.arange.start_step)):
        return
    rows, size, mode = cast(fx.Node, ids.args[0]), starts.args[2], cast(int, graph.argument(node, "mode"))
    shape, bags = rows.meta["val"].shape, node.meta["val"][0]
    left_out = graph.argument(node, "padding_idx")  # -1 is the last row where None is possible, else nothing
    is_plain = graph.argument(node, "per_sample_weights") is None and (
        left_out is None or (left_out == -1 and node.target is not aten.embedding_bag.padding_idx)
    )
    is_full = starts.args[0] == 0 and str([*shape]) == str([bags.shape[0], size]) and size != 0
    if not is_plain or not is_full or any(user.args[1] for user in node.users):
        return
    with module.graph.inserting_before(node):
        found = module.graph.call_function(aten.embedding.default, (node.args[0], rows, -1, False, False))
        call = module.graph.call_function(_REDUCTIONS[mode], (found, [1], False))
    found.meta = dict(node.meta)
    _stand_in(module, node, call)


def _stand_in(module: fx.GraphModule, node: fx.Node, call: fx.Node) -> None:
    """Let a call stand for another, or for the first of the values that another returns."""
    value = node.meta["val"]
    call.meta = {**node.meta, "val": value if isinstance(value, torch.Tensor) else value[0]}
    graph.normalize_arguments(call)
    for read in [node] if isinstance(value, torch.Tensor) else [user for user in node.users if user.args[1] == 0]:
        read.replace_all_uses_with(call)
        module.graph.erase_node(read)


def _normalize_batch_norm(module: fx.GraphModule, node: fx.Node) -> None:
    """Write any form of BatchNorm as ``batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn)``.

    Batch statistics are written as ``training=True`` without running statistics: the same outputs, nothing mutated.
    """
    frozen = node.target is aten._native_batch_norm_legit_no_training.default
    x, weight, bias = (graph.argument(node, name) for name in ("input", "weight", "bias"))
    mean = graph.argument(node, "running_mean") if frozen else None
    var = graph.argument(node, "running_var") if frozen else None
    training = not frozen and bool(graph.argument(node, "training"))
    if not frozen and not training:
        mean, var = graph.argument(node, "running_mean"), graph.argument(node, "running_var")
    with module.graph.inserting_before(node):
        call = module.graph.call_function(
            aten.batch_norm.default, (x, weight, bias, mean, var, training, 0.0, graph.argument(node, "eps"), False)
        )
    _stand_in(module, node, call)


def _normalize_decomposed(module: fx.GraphModule, node: fx.Node) -> None:
    """Write what torch decomposes a layer into as the layer, where nothing but its value is read."""
    layer, value = _DECOMPOSED[node.target], node.meta["val"]
    made = value if isinstance(value, torch.Tensor) else value[0]
    if made is not value and any(user.users for user in node.users if user.args[1]):
        return
    if made.dtype is not cast(fx.Node, node.args[0]).meta["val"].dtype:  # half to float
        return
    wanted = [(_RENAMED.get(entry.name, entry.name), entry.default_value) for entry in layer._schema.arguments]
    arguments = [graph.argument(node, name) if graph.has_argument(node, name) else usual for name, usual in wanted]
    with module.graph.inserting_before(node):
        _stand_in(module, node, module.graph.call_function(layer, tuple(arguments)))


def _normalize_pool(module: fx.GraphModule, node: fx.Node) -> None:
    """Leave out ``ceil_mode`` where it adds no window: runtimes count one that would begin in the padding.

    Where it does, a mean that counts the padding reads it as pixels: OpenVINO counts more of it.
    """
    x, *arguments = node.args
    sizes = [1 if dim == 0 else size for dim, size in enumerate(cast(fx.Node, x).meta["val"].shape)]
    place = [entry.name for entry in node.target._schema.arguments].index("ceil_mode") - 1  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in sizes):
        return
    if _pools_as(node, sizes, [*arguments[:place], False, *arguments[place + 1 :]]):
        graph.set_argument(node, "ceil_mode", False)
    elif node.target in ops.AVERAGE_POOLS and graph.argument(node, "count_include_pad"):
        dims = ops.SPATIAL_AXES[node.target]
        padding = [*graph.argument(node, "padding")] * dims
        widths = [side for pad in reversed(padding[:dims]) for side in (pad, pad)]
        around = [size + 2 * pad for size, pad in zip(sizes[-dims:], padding, strict=False)]
        if any(widths) and _pools_as(node, [*sizes[:-dims], *around], [*arguments[:2], [0] * dims, *arguments[3:]]):
            node.args = (_padded(module, node, widths), *arguments[:2], [0] * dims, *arguments[3:])


def _normalize_divisor(module: fx.GraphModule, node: fx.Node) -> None:
    """Write a pool that divides by a number of its own as a mean over whole windows, and a factor: runtimes have none.

    Windows that ``ceil_mode`` adds are whole once there are zeros as far as they reach; of a free size nobody knows.
    """
    x, kernel, stride, padding, rounds_up, _, divisor = cast(tuple[Any, ...], node.args)
    dims = ops.SPATIAL_AXES[node.target]
    kernel, stride, padding = (
        [*each] * (dims if len(each) == 1 else 1) for each in (kernel, stride or kernel, padding)
    )
    sizes, made = (each.meta["val"].shape[-dims:] for each in (x, node))
    if rounds_up and not all(isinstance(size, int) for size in sizes):
        return
    over = [
        max(0, (n - 1) * step + width - size - 2 * pad) if rounds_up else 0
        for n, step, width, size, pad in zip(made, stride, kernel, sizes, padding, strict=True)
    ]
    widths = [side for pad, more in zip(reversed(padding), reversed(over), strict=True) for side in (pad, pad + more)]
    x = _padded(module, node, widths) if any(widths) else x
    with module.graph.inserting_before(node):
        mean = module.graph.call_function(node.target, (x, kernel, stride, [0] * dims, False, True, None))  # type: ignore[arg-type]
        _stand_in(module, node, module.graph.call_function(aten.mul.Tensor, (mean, math.prod(kernel) / divisor)))
    mean.meta = dict(node.meta)


def _padded(module: fx.GraphModule, node: fx.Node, widths: Sequence[int]) -> fx.Node:
    """Insert a call that puts zeros around what another reads; its shape is found with those of all."""
    with module.graph.inserting_before(node):
        padded = module.graph.call_function(aten.constant_pad_nd.default, (node.args[0], [*widths], 0))
    padded.meta = dict(node.meta)
    return padded


def _pools_as(node: fx.Node, sizes: Sequence[int], arguments: Sequence[Any]) -> bool:
    """Say whether a pool of another image, by other arguments, has the size of this one."""
    with contextlib.suppress(RuntimeError):  # there would be no window at all
        found = cast(Callable[..., torch.Tensor], node.target)(torch.empty(sizes, device="meta"), *arguments)
        return found.shape[1:] == node.meta["val"].shape[1:]
    return False


def _normalize_convolution(node: fx.Node) -> None:
    """Write a convolution of any number of dimensions, transposed or not, as the one that it is."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args[:9]
    kinds = ops.TRANSPOSED_CONVOLUTIONS if transposed else ops.CONVOLUTIONS
    node.target = kinds[weight.meta["val"].dim() - 3]  # type: ignore[union-attr]
    more = (output_padding, groups, dilation) if transposed else (dilation, groups)
    node.args = (x, weight, bias, stride, padding, *more)


def _normalize_same_padding(module: fx.GraphModule, node: fx.Node) -> None:
    """Write ``padding='same'|'valid'`` as integers, with a pad before the convolution where it is not symmetric."""
    x, weight, bias, stride, padding, dilation, groups = node.args
    kernel = weight.meta["val"].shape[2:]  # type: ignore[union-attr]
    dims = len(kernel)
    dilations = [dilation[0]] * dims if len(dilation) == 1 else list(dilation)  # type: ignore[index,arg-type]
    totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)]
    if any(total % 2 for total in totals):
        widths = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
        x, totals = _padded(module, node, widths), [0] * dims
    node.target = ops.CONVOLUTIONS[dims - 1]
    node.args = (x, weight, bias, stride, [total // 2 for total in totals], dilation, groups)
