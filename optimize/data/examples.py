"""Example inputs from ``--input-shape``: random numbers of the sizes that a user writes."""

from __future__ import annotations

import torch

from optimize import bounds
from optimize.errors import InputsUnknown

#: Types of inputs that can be drawn, and held by arrays.
_TYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool", "complex64", "complex128",
)  # fmt: skip


def draw_inputs(shapes: str | None, samples: int = 2) -> tuple[torch.Tensor, ...]:
    """Return inputs ``[samples, *sizes]`` as ``--input-shape`` describes them, the same ones at every call.

    Args:
        shapes: Sizes of one sample, such as ``3,224,224`` or ``16:int64``; several inputs with ``;`` between them.
        samples: How many.

    Raises:
        InputsUnknown: It is not given.
        UsageError: It is malformed.

    >>> [(tuple(tensor.shape), tensor.dtype) for tensor in draw_inputs("3,8,8;16:int64")]
    [((2, 3, 8, 8), torch.float32), ((2, 16), torch.int64)]
    """
    if not shapes:
        raise InputsUnknown(
            "Nothing says what the model takes.", hint="Give --input-shape, such as 3,224,224, or data."
        )
    generator = torch.Generator().manual_seed(0)
    return tuple(_drawn(*part, generator) for part in bounds.read_shapes(shapes, samples))


def _drawn(shape: tuple[int, ...], dtype_name: str, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in {getattr(torch, name) for name in _TYPES}:
        raise bounds.no_shape(dtype_name, f"'{dtype_name}' is none of the types {', '.join(_TYPES)}")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)  # the only token every vocabulary has; varied once the tables are known
