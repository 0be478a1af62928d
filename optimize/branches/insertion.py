"""Puts branches into a model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from optimize.branches import kinds
from optimize.branches.layers import CONVOLUTIONS, Branches, Conv
from optimize.distances import output_error
from optimize.errors import Refused, VerificationFailed, require, spell
from optimize.preparation import private_copy
from optimize.records import Skip

#: What helps where a model with branches is not what it was.
_HELD = "Let it call each convolution as its submodule, not from a list or by its method."
_MODEL = "Give the nn.Module itself."
#: The most that a copy is off, as a share of its largest output: rounding, in 16 bits and in more.
_ROUNDING_16, _ROUNDING = 3e-2, 1e-3
_TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def insert_branches(model: nn.Module, kind: str, *, inputs: torch.Tensor | Sequence[Any] | None = None) -> nn.Module:
    """Return a copy of a model whose convolutions are sums of trainable branches; it computes what the model computes.

    In evaluation the copy equals the model up to float rounding. In training it does too where a BatchNorm follows the
    convolution (normalising twice is normalising once, up to eps), and everywhere on ``inputs`` when they are given.
    Train it like the model, then give it to :func:`merge_branches`.

    Kinds, for a convolution with kernel k:

    - ``"repvgg"``: k, 1x1 and the identity (X. Ding et al., 2021, arXiv 2101.03697);
    - ``"acb"``: k, its middle row and its middle column (ACNet; X. Ding et al., 2019, arXiv 1908.03930);
    - ``"dbb"``: k, 1x1, 1x1 then k, 1x1 then average (Diverse Branch Block; X. Ding et al., 2021, arXiv 2103.13425);
    - ``"mobileone"``: four times k, 1x1 and the identity (P. K. A. Vasu et al., 2022, arXiv 2206.04040).

    A branch that does not fit a convolution is left out, and a convolution that none fits is left alone:
    :func:`explain_branches` says which and why.

    Args:
        model: The model; it is not touched.
        kind: One of the names above.
        inputs: Example positional arguments (or the only one), a typical batch. The model is run on them once in
            evaluation mode, and every norm starts from the statistics it meets there (of the last call, where a
            convolution is called several times). Without them the tracked
            variance starts at 1 and takes some tens of steps to settle.

    Raises:
        UsageError: There is no such kind.
        UsageError: What is given is no module, or ``inputs`` are no tensor and no sequence.
        Refused: The model has branches already, no convolution can take any, or on ``inputs`` the model fails, answers
            NaN, or is not what it was, as where it holds a convolution by another way than as its submodule.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8)).eval()
        >>> branched = insert_branches(net, "acb")
        >>> sorted(name for name, _ in branched[0].sides.named_children())
        ['column', 'row']
        >>> x = torch.randn(2, 3, 16, 16)
        >>> bool(torch.allclose(branched(x), net(x), atol=1e-5))
        True
    """
    reasons = _reasons(model, kind)
    paths = [path for path, reason in reasons.items() if not reason]
    if not paths:
        listed = "; ".join(f"'{path}': {reason}" for path, reason in list(reasons.items())[:3])
        raise Refused(f"No convolution of the model can take '{kind}' branches.", hint=listed)
    branched = private_copy(model)
    convs = [cast(Conv, branched.get_submodule(path)) for path in paths]
    sides = {conv: kinds.build(conv, kind) for conv in convs}
    branched = replaced(branched, {conv: Branches(_taken(conv), built) for conv, built in sides.items()})
    if inputs is not None:
        given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        require(given, Sequence, "inputs", "Give a tensor, or a list of the model's arguments.")
        _check_equal(_answered(private_copy(model), given), _answered(branched, given, list(_listening(branched))))
    return branched


def _taken(conv: Conv) -> Conv:
    """Return a convolution with the weights of another, which has none from then on.

    Whoever still reads that one, not as a submodule, would get what it computes without its branches and its bias.
    """
    taken = copy.copy(conv)
    taken._parameters, conv._parameters = conv._parameters, {}
    return taken


def explain_branches(model: nn.Module, kind: str) -> tuple[Skip, ...]:
    """Return every convolution that :func:`insert_branches` leaves alone, with the reason.

    Args:
        model: The model; it is not touched.
        kind: One of the kinds of :func:`insert_branches`.

    Raises:
        UsageError: There is no such kind.
        Refused: The model has branches already.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.Conv2d(8, 8, 3))
        >>> explain_branches(net, "dbb")
        (Skip(where='0', op='conv2d', reason='its kernel has one tap'),)
    """
    found = _reasons(model, kind).items()
    modules = dict(model.named_modules())
    return tuple(Skip(path, _operator(modules[path]), reason) for path, reason in found if reason)


def replaced(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put modules in the place of others, wherever those stand, in place; return the model.

    Args:
        model: The model; returned unless it is itself replaced.
        new: What to put in place of each module.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in new:
                parent.add_module(name, new[child])
    return new.get(model, model)


def _reasons(model: nn.Module, kind: str) -> dict[str, str]:
    """Return why each convolution is left alone, by path; an empty reason where it is not."""
    require(model, nn.Module, "model", _MODEL)
    kinds.check_kind(kind)
    if any(isinstance(module, Branches) for module in model.modules()):
        raise Refused("The model has branches already.", hint="Merge them first: optimize.merge_branches(model).")
    owners = Counter(
        id(tensor) for module in model.modules() for tensor in module._parameters.values() if tensor is not None
    )
    classes = (*CONVOLUTIONS.values(), *_TRANSPOSED)
    convs = {path: module for path, module in model.named_modules() if isinstance(module, classes)}
    return {path: _why_left(conv, owners) or kinds.why_not(cast(Conv, conv), kind) for path, conv in convs.items()}


def _why_left(conv: nn.Module, owners: Mapping[int, int]) -> str:
    """Return why a convolution can take no branches of any kind, or an empty string."""
    if isinstance(conv, _TRANSPOSED):
        return "a transposed convolution has no branches that merge"
    if conv._parameters.get("weight") is None:
        return "its weight is computed from others (weight norm, a mask or a parametrization)"
    if type(conv) not in CONVOLUTIONS.values():
        plain = CONVOLUTIONS[len(cast(Conv, conv).kernel_size)].__name__
        return f"{type(conv).__name__} may compute something else than {plain}"
    if any(owners[id(tensor)] > 1 for tensor in conv.parameters()):
        return "another module has the same weight"
    if not all(tensor.requires_grad for tensor in conv.parameters()):
        return "it is frozen (requires_grad=False)"
    if conv._forward_hooks or conv._forward_pre_hooks or conv._backward_hooks or conv._backward_pre_hooks:
        return "it has hooks, which would see one branch of several"
    return ""


def _operator(conv: nn.Module) -> str:
    dims = len(cast(Conv, conv).kernel_size)
    return f"conv_transpose{dims}d" if isinstance(conv, _TRANSPOSED) else f"conv{dims}d"


@torch.no_grad()
def _answered(model: nn.Module, inputs: Sequence[Any], handles: Sequence[RemovableHandle] = ()) -> list[torch.Tensor]:
    """Return the tensors that a model gives, run once in evaluation mode; hooks are removed afterwards."""
    training = {module: module.training for module in model.modules()}
    try:
        found = pytree.tree_leaves(model.eval()(*copy.deepcopy(inputs)))
        return [each for each in found if isinstance(each, torch.Tensor) and each.is_floating_point()]
    except Exception as error:
        raise Refused(f"The model fails on the inputs: {spell(error)}.") from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode


def _check_equal(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    for want, got in zip(wanted, found, strict=True):
        if want.numel() == 0 or not bool(want.isfinite().any()):
            raise Refused("The model answers with no number to these inputs.", hint="Give a typical batch.")
        try:
            error, largest = output_error(want, got)
        except VerificationFailed as failed:
            raise Refused(f"With branches the model is another: {failed.what}", hint=_HELD) from failed
        if error > (_ROUNDING if want.element_size() > 2 else _ROUNDING_16) * largest:
            raise Refused(f"With branches the model is another: an output is off by {error / largest:.2g}.", hint=_HELD)


def _listening(model: nn.Module) -> Iterator[RemovableHandle]:
    for block in model.modules():
        if isinstance(block, Branches):
            for norm in block.norms():
                hook = _take_statistics_unnoticed if norm is block.main.norm else _take_statistics
                yield norm.register_forward_pre_hook(hook)


def _take_statistics(norm: nn.Module, values: tuple[torch.Tensor]) -> None:
    """Set the tracked statistics of a norm to those of the batch it is about to read."""
    statistics = dict(norm.named_buffers())
    axes = [0, *range(2, values[0].dim())]
    variance, mean = torch.var_mean(values[0].to(statistics["running_var"].dtype), axes, correction=0)
    statistics["running_var"].copy_(variance)
    if "running_mean" in statistics:
        statistics["running_mean"].copy_(mean)


def _take_statistics_unnoticed(norm: nn.Module, values: tuple[torch.Tensor]) -> None:
    """Set the tracked statistics of a neutral norm, and its gamma and beta with them, so that it stays neutral."""
    weights = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
    if "bias" in weights:
        weights["bias"].sub_(weights["running_mean"])
    _take_statistics(norm, values)
    weights["weight"].copy_(torch.sqrt(weights["running_var"] + cast(float, norm.eps)))
    if "bias" in weights:
        weights["bias"].add_(weights["running_mean"])
