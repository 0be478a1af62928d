"""Arrays of every element type that runtimes take: NumPy has no bfloat16, ``ml_dtypes`` (which onnx needs) adds it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from optimize.errors import Refused

if TYPE_CHECKING:
    import torch

_HALVES = ("float16", "bfloat16")


def element_type(name: str) -> np.dtype:
    """Return the element type of a name in a ``TensorSpec``.

    >>> element_type("float32"), element_type("bfloat16").itemsize
    (dtype('float32'), 2)
    """
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def count_samples(inputs: Sequence[np.ndarray]) -> int:
    """Return how many samples flat inputs hold: the first dimension of the first is the batch."""
    return len(inputs[0]) if inputs and inputs[0].ndim else 1


def fitted(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 numbers in the 16-bit float type that a file takes; any other array as it is."""
    return array.astype(element_type(dtype)) if dtype in _HALVES and array.dtype == np.float32 else array


def is_float(array: np.ndarray) -> bool:
    """Say whether an array holds real numbers that are no integers."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def storable(array: np.ndarray) -> np.ndarray:
    """Return an array that ``.npz`` holds: bfloat16 as float32, which has each of its numbers."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def as_reals(array: np.ndarray) -> np.ndarray:
    """Return numbers as float64 to be compared one by one; complex ones as pairs of reals, an axis of two behind.

    Raises:
        TypeError: They are no numbers.

    >>> as_reals(np.array([1 + 2j])).tolist(), as_reals(np.array([True])).tolist()
    ([[1.0, 2.0]], [1.0])
    """
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], -1).astype(np.float64)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"{array.dtype} holds no numbers")
    return array.astype(np.float64)


def digest(arrays: Sequence[np.ndarray]) -> str:
    """Return the SHA-256 of arrays with their shapes and types, hexadecimal.

    >>> digest([np.zeros(2)])[:8] == digest([np.zeros(2, np.float32)])[:8]
    False
    """
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's values on the CPU as an array of the same element type and shape.

    Raises:
        Refused: A model returned something else.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise Refused(f"A model returns {type(tensor).__name__}, no tensor.", hint="Return tensors.")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    return tensor.contiguous().view(torch.uint16).numpy().view(element_type("bfloat16"))


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor of the same element type and shape; memory is shared where torch allows it."""
    import torch

    array = np.asarray(array, order="C")  # unlike ascontiguousarray, which makes [1] of no dimensions
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
