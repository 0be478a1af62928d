"""A GPU that is not there: tensors are on it in name, and what mixes devices fails without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
#: They take what is elsewhere, too, and what they make is where the first of their tensors is, or the last.
_FIRST = {Tensor.copy_, Tensor.device.__get__}  # type: ignore[attr-defined]
_LAST = {Tensor.to, Tensor.data.__set__}  # type: ignore[attr-defined]
#: They compute nothing.
_OF_NAMES = {torch.device, torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type}
#: A tensor on a GPU takes indices that are on the CPU.
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_}


class Elsewhere(TorchFunctionMode):
    """While it is entered, tensors can be on a GPU in name; everything is computed on the CPU.

    Example:
        >>> from torch import nn
        >>> with Elsewhere():
        ...     x = torch.ones(2, device=GPU)
        ...     (x + 1).device.type, x.cpu().device.type, torch.zeros(2).to(x).device.type
        ('cuda', 'cpu', 'cuda')
        >>> with Elsewhere():
        ...     nn.Linear(2, 2).to(GPU)(torch.ones(2))
        Traceback (most recent call last):
        RuntimeError: linear is given tensors on cuda:0 and on the CPU
    """

    def __init__(self) -> None:
        super().__init__()
        self._there = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (args, dict(kwargs or {}))
        if function in _OF_NAMES:
            return function(*args, **given[1])
        tensors = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
        there = [each in self._there for each in tensors]
        if function == Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU if there[0] else CPU
        on_gpu = any(there)
        if function in _FIRST or function in _LAST:
            on_gpu = there[0 if function in _FIRST else -1]
        elif on_gpu and not (function in _INDEXING and there[0]) and not all(map(_fits, tensors, there)):
            raise RuntimeError(f"{getattr(function, '__name__', function)} is given tensors on {GPU} and on the CPU")
        if asked := [torch.device(each) for each in tree_leaves(given) if _is_device(each)]:
            on_gpu = asked[0] == GPU
            given = tree_map(lambda each: CPU if _is_device(each) else each, given)
        if function == Tensor.cpu:
            on_gpu = False
        found = function(*given[0], **given[1])
        if isinstance(found, Tensor) and tensors and found is tensors[0] and on_gpu != there[0]:
            found = found.clone()  # it would have been another one
        made = tensors[:1] if function == Tensor.data.__set__ else tree_leaves(found)  # type: ignore[attr-defined]
        for each in made:
            if isinstance(each, Tensor):
                self._there.pop(each, None)
                if on_gpu:
                    self._there[each] = True
        return found


def _fits(tensor: Tensor, is_there: bool) -> bool:
    """Say whether a tensor may meet others that are on the GPU: a number of the CPU may."""
    return is_there or tensor.dim() == 0


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.startswith(("cuda", "cpu")))
