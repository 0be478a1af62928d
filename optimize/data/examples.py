"""Example inputs from ``--input-shape``: random numbers of the sizes that a user writes."""

from __future__ import annotations

import torch

from optimize import bounds
from optimize.errors import InputsUnknown, UsageError
from optimize.escaping import shortened


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
            "Nothing says what the model takes.", hint="Give --input-shape, such as 3,224,224, or data with --calib."
        )
    generator = torch.Generator().manual_seed(0)
    return tuple(_drawn(part, samples, generator) for part in shapes.split(";"))


def _drawn(text: str, samples: int, generator: torch.Generator) -> torch.Tensor:
    sizes, _, dtype_name = text.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    try:
        shape = bounds.sizes([samples, *(bounds.SIZE.read(size) for size in sizes.split(",") if size.strip())])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"'{dtype_name}' is not a type")
    except ValueError as error:
        raise UsageError(
            f"--input-shape '{shortened(text)}' is not a shape: {error}.",
            hint="Write sizes without the batch: 3,224,224 or 16:int64.",
        ) from error
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)  # the only token every vocabulary has; varied once the tables are known
