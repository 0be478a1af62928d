"""Less memory for more time: what is inside of some modules is computed again where gradients need it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from optimize.errors import UsageError, nearest


@contextlib.contextmanager
def recomputing(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let modules keep nothing but their inputs and outputs until gradients are computed, within a ``with``.

    Gradients and statistics of BatchNorm are those of the modules as they are (T. Chen et al., "Training Deep Nets
    with Sublinear Memory Cost", 2016, arXiv 1604.06174).

    Args:
        module: Whose modules they are.
        names: Their names.

    Raises:
        UsageError: There is no module of that name.
    """
    known = dict(module.named_modules())
    with contextlib.ExitStack() as stack:
        for name in names:
            if name not in known:
                hint = nearest(name, known)
                raise UsageError(f"recompute: '{name}' is no module of {type(module).__name__}.", hint=hint)
            child = known[name]
            contexts = functools.partial(_contexts, child)
            again = functools.partial(checkpoint, child.forward, use_reentrant=False, context_fn=contexts)
            stack.callback(_restore, child, vars(child).get("forward"))
            child.forward = again
        yield


def _restore(child: nn.Module, forward: Any) -> None:
    del child.forward
    if forward is not None:
        child.forward = forward


def _contexts(
    child: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _counted_once(child)


@contextlib.contextmanager
def _counted_once(child: nn.Module) -> Iterator[None]:
    """Let no BatchNorm take the same batch into its statistics again."""
    norms = [norm for norm in child.modules() if isinstance(norm, _BatchNorm)]
    held = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in held:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if count is None else torch.clone(count)
    try:
        yield
    finally:
        for norm, momentum, count in held:
            norm.momentum, norm.num_batches_tracked = momentum, count
