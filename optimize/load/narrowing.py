"""Give a module the widths of pruned weights: the class that its owner wrote, to be trained on."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from optimize.distances import output_error
from optimize.errors import Refused, UsageError, spell
from optimize.from_export import module_name
from optimize.invariants import EXACT_TOLERANCE
from optimize.merged import NOTHING, STANDS_FOR, Merged, read_spec
from optimize.preparation import private_copy
from optimize.program import Program

#: What modules call the number of their heads, and the width of all of them.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_OF_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "attn_dim", "all_head_size", "inner_dim")
#: Names of the projections that have a row for each number of each head.
_PROJECTIONS = re.compile(r"(^|[._])([qkv]+|query(_key_value)?|key|value|in_proj|c_attn)([._]|$)")
#: Of recurrent layers, those that have several.
_GATES = {"LSTM": 4, "GRU": 3}
#: Letters of a path that a message has.
_LONGEST = 40
_ARGUMENTS = "Are these weights of this module, made with the same arguments?"
_INTACT = "Leave such modules as they are: PruneChannels(ratio, intact=('*.attention',)), or name others."


def narrow(module: nn.Module, weights: Program | Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy of a module that holds pruned weights, in the mode that the module is in, to train it on.

    Modules that ``ReduceDepth`` let one layer stand for are that layer, a :class:`Merged`.

    The copy is of the module's own class: BatchNorm learns, dropout drops, a training loop knows it. Each weight is
    the pruned one of its name, and what counts channels (``out_channels``, ``num_features``, ``groups``,
    ``hidden_size``, ``num_heads``) says how many there are now. With a program, the copy's answers are compared with
    the program's. The copy's state dict (and any later one) is all that has to be kept: it fits a new module of the
    class through this function, and a file of it is opened with ``--model package.module:factory``.

    Args:
        module: The module that was captured; it is not touched.
        weights: What ``PruneChannels`` or ``ReduceDepth`` returned (before layers are fused), or a state dict of such a
            copy: each tensor as many axes as the module's own, none of them longer.

    Raises:
        UsageError: These are no weights.
        Refused: A weight is missing, is wider than the module's or of another kind; the program is one for INT8, whose
            weights are rounded; or the module's code computes with a width that it does not count in an attribute known
            here, so that the copy fails or answers differently.

    Example:
        >>> import optimize
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> pruned, _ = optimize.PruneChannels(0.5).apply(optimize.capture(net, (torch.rand(2, 3, 8, 8),)))
        >>> thin = narrow(net, pruned).train()
        >>> thin[0], thin[1].num_features
        (Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), 4)
        >>> narrow(net, thin.state_dict())[3].weight.shape
        torch.Size([4, 4, 3, 3])
    """
    if not isinstance(weights, Program | Mapping):
        what = f"narrow takes a program or a state dict, and got a {type(weights).__name__}."
        raise UsageError(what, hint="Of what a pipeline returns take program: narrow(module, trace.program).")
    program = weights if isinstance(weights, Program) else None
    if program is not None and program.unquantized is not None:
        what = "The weights of this program are rounded for INT8; who trains a module on wants them as they were."
        raise Refused(what, hint="Take the program before the pass that quantizes: it is program.unquantized.")
    found = _tensors(weights)
    if any(map(is_lazy, module.parameters())):
        raise Refused("A layer of the module has no weights yet.", hint="Run the module once before.")
    thin = private_copy(module)
    for path, spec in (_stated(found) if program is None else _recorded(program)).items():
        _replace(thin, path, Merged(spec, found.get(f"{path}.0.weight")))
    if program is None:
        _require_buffers(thin, found)
    shapes = {name: tensor.shape for name, tensor in _tensors(thin).items()}
    narrowed = _narrowed(thin, found)
    for child in thin.modules():
        held = {name: (old, narrowed[id(old)]) for name, old in child._buffers.items() if id(old) in narrowed}
        thinner = {name for name, (old, new) in held.items() if old is not None and new.shape != old.shape}
        child._non_persistent_buffers_set -= thinner  # without them its state dict would not fit a new module
        for holder in (child._parameters, child._buffers):
            holder.update({name: narrowed[id(old)] for name, old in holder.items() if id(old) in narrowed})
    with _computing(thin):
        _require_lengths(thin)
        for path, child in thin.named_modules():
            for kind, count in _COUNTS.items():
                if isinstance(child, kind):
                    count(child)
            _count_heads(child, f"{path}." if path else "", shapes, found)
    if program is not None:
        _check(thin, program)
    return thin


@contextlib.contextmanager
def _computing(thin: nn.Module) -> Iterator[None]:
    """Refuse weights from which a module cannot compute its own: those of a spectral norm that do not fit."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        what = f"The weights of {type(thin).__name__} do not fit each other: {spell(error)}."
        raise Refused(what, hint=_ARGUMENTS) from error


def _replace(root: nn.Module, path: str, new: nn.Module) -> None:
    try:
        new.train(root.get_submodule(path).training)
        root.set_submodule(path, new, strict=True)
    except (AttributeError, ValueError) as error:
        raise Refused(f"'{path[:_LONGEST]}' is no module of {type(root).__name__}.") from error


def _recorded(program: Program) -> dict[str, str]:
    """Return what stands for modules of a program, by their paths: the first of several has the layer."""
    records = [record for node in program.graph.nodes for record in node.meta.get(STANDS_FOR, ())]
    return {path: NOTHING if place else spec for paths, spec in records for place, path in enumerate(paths)}


def _stated(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the same as the state dict of such a module says it."""
    held = {name.removesuffix(f".{STANDS_FOR}"): value for name, value in state.items() if name.endswith(STANDS_FOR)}
    return {path: read_spec(value) for path, value in held.items()}


def _tensors(weights: Program | nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return every weight and buffer by each of its names, detached."""
    if isinstance(weights, Mapping):
        return {name: tensor.detach() for name, tensor in weights.items() if isinstance(tensor, torch.Tensor)}
    held = weights.graph_module if isinstance(weights, Program) else weights
    named = (*held.named_parameters(remove_duplicate=False), *held.named_buffers(remove_duplicate=False))
    called = module_name if isinstance(weights, Program) else str
    return {called(name): tensor.detach() for name, tensor in named}


def _narrowed(module: nn.Module, found: Mapping[str, torch.Tensor]) -> dict[int, Any]:
    """Return the thin weight for each of a module's, by identity: weights that were one stay one.

    A buffer that no program keeps, a count of batches or a mask, is left as it is.
    """
    names: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, torch.Tensor] = {}
    for listed in (module.named_parameters, module.named_buffers):
        for name, old in listed(remove_duplicate=False):
            names[id(old)].append(name)
            tensors[id(old)] = old
    thin: dict[int, Any] = {}
    for key, old in tensors.items():
        path = next((name for name in names[key] if name in found), names[key][0])
        if isinstance(old, nn.Parameter):
            thin[key] = nn.Parameter(_taken(path, old, found), old.requires_grad)
        elif path in found:
            thin[key] = _taken(path, old, found)
    return thin


def _require_buffers(module: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """Refuse a state dict without values that a module keeps in its own, such as the statistics of a BatchNorm."""
    kept = module.state_dict()
    missing = [name for name, value in module.named_buffers() if name in kept and value.dim() and name not in found]
    if missing:
        raise Refused(f"The pruned weights have no '{missing[0]}', which the module keeps in its state dict.")


def _taken(path: str, old: torch.Tensor, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
    new = found.get(path)
    if new is None:
        raise Refused(
            f"The pruned weights have no '{path}', which the module has.",
            hint="Take the program as PruneChannels returned it, before its layers are fused, of this very module. "
            "What its forward pass does not read in evaluation mode, take out of the module before.",
        )
    if new.dim() != old.dim() or any(size > most for size, most in zip(new.shape, old.shape, strict=True)):
        raise Refused(
            f"'{path}' is {list(new.shape)}; pruned from the module's {list(old.shape)} it cannot be.",
            hint=_ARGUMENTS,
        )
    try:
        return torch.empty(new.shape, dtype=old.dtype, device=old.device).copy_(new)
    except RuntimeError as error:
        raise Refused(f"'{path}' is {new.dtype}, which does not become the module's {old.dtype}.") from error


def _require_lengths(thin: nn.Module) -> None:
    """Refuse directions and lengths of a weight norm that do not fit each other: its kernel writes past the shorter."""
    for child in thin.modules():
        hooks = [hook for hook in child._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        pairs = [(getattr(child, f"{each.name}_g"), getattr(child, f"{each.name}_v"), each.dim) for each in hooks]
        if isinstance(child, ParametrizationList) and isinstance(child[0], _WeightNorm):
            pairs = [(child.original0, child.original1, child[0].dim)]
        for lengths, directions, dim in pairs:
            if torch.norm_except_dim(directions.detach().to("meta"), 2, dim).shape != lengths.shape:
                what = f"A weight norm has lengths of {list(lengths.shape)} for {list(directions.shape)} weights."
                raise Refused(what, hint=_ARGUMENTS)


def _count_convolution(layer: Any) -> None:
    rows, columns, *kernel = layer.weight.shape
    if tuple(kernel) != layer.kernel_size:
        raise Refused(f"A weight has a kernel of {kernel}, the module's {type(layer).__name__} {layer.kernel_size}.")
    one, other = (
        (layer.in_channels, layer.out_channels) if layer.transposed else (layer.out_channels, layer.in_channels)
    )
    if layer.groups > 1 and other == layer.groups and not layer.transposed:
        layer.groups = rows // (one // layer.groups)  # depthwise: a group for each channel that is left
    elif layer.groups > 1 and one == layer.groups and layer.transposed:
        layer.groups = rows
    counts = (rows, columns * layer.groups)
    layer.in_channels, layer.out_channels = counts if layer.transposed else counts[::-1]


def _count_recurrent(layer: Any) -> None:
    """Count, and refuse weights that a new layer of these sizes would not have: kernels go by the sizes alone."""
    rows, shown = layer.weight_hh_l0.shape
    layer.hidden_size, layer.input_size = rows // _GATES.get(layer.mode, 1), layer.weight_ih_l0.shape[1]
    layer.proj_size = shown if layer.proj_size else 0
    names, sizes = layer._flat_weights_names, (layer.input_size, layer.hidden_size, layer.num_layers, layer.bias)
    layer._flat_weights = [getattr(layer, name) for name in names]
    with contextlib.suppress(ValueError):  # of no width at all
        two, proj = layer.bidirectional, layer.proj_size
        made = nn.RNNBase(layer.mode, *sizes, bidirectional=two, proj_size=proj, device="meta").parameters()
        known = all(name in layer._parameters or is_parametrized(layer, name) for name in names)
        if known and [each.shape for each in made] == [each.shape for each in layer._flat_weights]:
            return
    raise Refused(f"The weights of a recurrent {type(layer).__name__} do not fit each other.", hint=_ARGUMENTS)


def _set(**sizes: int) -> Callable[[Any], None]:
    """Return what sets attributes to sizes of the weight by axis."""

    def count(layer: Any) -> None:
        if getattr(layer, "weight", None) is not None:
            for name, axis in sizes.items():
                setattr(layer, name, layer.weight.shape[axis])

    return count


def _count_features(layer: Any) -> None:
    layer.num_features = len(layer.running_mean if layer.weight is None else layer.weight)


_COUNTS: Mapping[Any, Callable[[Any], None]] = {
    _ConvNd: _count_convolution,
    nn.Linear: _set(out_features=0, in_features=1),
    _BatchNorm: _count_features,
    nn.PReLU: _set(num_parameters=0),
    nn.Embedding: _set(num_embeddings=0, embedding_dim=1),
    nn.RNNBase: _count_recurrent,
}


def _count_heads(
    child: nn.Module, prefix: str, before: Mapping[str, torch.Size], after: Mapping[str, torch.Tensor]
) -> None:
    """Let a module count the heads that its own projections still have."""
    heads = next((name for name in _HEADS if isinstance(vars(child).get(name), int)), None)
    if heads is None:
        return
    own = {name: name.removeprefix(prefix) for name in before if name.startswith(prefix) and name in after}
    direct = {name: inner for name, inner in own.items() if len(before[name]) == 2 and inner.count(".") < 2}
    rows = [name for name, inner in direct.items() if _PROJECTIONS.search(inner)]
    share = min((Fraction(after[name].shape[0], before[name][0]) for name in rows), default=Fraction(1))
    for name in (heads, *_OF_HEADS):
        if isinstance(count := vars(child).get(name), int) and (count * share).denominator == 1:
            setattr(child, name, int(count * share))


def _check(thin: nn.Module, program: Program) -> None:
    """Compare the copy's answers with the program's.

    Raises:
        Refused: It fails, or answers differently.
    """
    args, kwargs = pytree.tree_unflatten(list(program.inputs), program.in_spec)
    wanted = program.run(program.inputs)
    try:
        with torch.no_grad():
            answers = private_copy(thin).eval()(*args, **kwargs)
    except Exception as error:
        raise Refused(f"The module does not run with fewer channels: {spell(error)}.", hint=_INTACT) from error
    found = [value for value in pytree.tree_leaves(answers) if isinstance(value, torch.Tensor)]
    if len(found) != len(wanted):
        return  # some of its outputs were left out of the program
    for want, got in zip(wanted, found, strict=True):
        distance, scale = output_error(want, got.detach()) if want.shape == got.shape else (1.0, 1.0)
        if distance / scale > EXACT_TOLERANCE.get(want.dtype, 0.0):
            raise Refused("The module answers differently from the program with the same pruned weights.", hint=_INTACT)
