"""How a runner is called: on torch tensors or NumPy arrays, with the module's own signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optimize.errors import Refused
from optimize.targets.arrays import to_array, to_tensor

if TYPE_CHECKING:
    from optimize.targets.base import Runner, TensorSpec


def call(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Flatten, check, run and put the outputs back into the structure the module returned.

    Raises:
        Refused: The structure or the number of inputs, a shape or a dtype does not fit the artifact.
    """
    from torch.utils import _pytree as pytree

    flat, structure = pytree.tree_flatten((args, kwargs))
    specs, expected = runner.artifact.inputs, runner.artifact.in_spec
    named = dict(zip((spec.name for spec in specs), args, strict=False)) | kwargs
    if kwargs and len(args) + len(kwargs) == len(specs) and all(spec.name in named for spec in specs):
        flat = [named[spec.name] for spec in specs]  # by the names that the module's parameters had
    elif len(flat) != len(specs) or (expected and structure != pytree.treespec_loads(expected)):
        given = f"{len(args)} and, by name, {list(kwargs)}" if kwargs else str(len(flat))
        raise Refused(
            f"The artifact takes {len(specs)} input(s) {[spec.name for spec in specs]}; got {given}.",
            hint="Give them as the module took them when it was captured: in their order, or by the names it had.",
        )
    wants_tensors = any(hasattr(value, "detach") for value in flat)
    arrays = [to_array(value) if hasattr(value, "detach") else np.asarray(value) for value in flat]
    arrays = [check_array(array, spec) for array, spec in zip(arrays, specs, strict=True)]
    with runner.answering():
        outputs: list[Any] = runner.run(arrays)
    if wants_tensors:
        outputs = [to_tensor(output) for output in outputs]
    return pytree.tree_unflatten(outputs, pytree.treespec_loads(runner.artifact.out_spec))


def check_array(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Return the array, checked against what the artifact takes.

    Raises:
        Refused: Its shape or dtype does not fit.
    """
    fits = array.ndim == len(spec.shape) and all(
        isinstance(want, str) or want == got for want, got in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        raise Refused(f"Input '{spec.name}' must have shape {list(spec.shape)}; got {list(array.shape)}.")
    if array.dtype.name != spec.dtype:
        raise Refused(f"Input '{spec.name}' must be {spec.dtype}; got {array.dtype.name}.")
    return array
