"""Finds where a monotone chain of operators crosses a step, channel by channel, to the last bit.

Rounding keeps order: ``a <= b`` gives ``round(s * a + t) <= round(s * b + t)`` for ``s >= 0``. So a comparison of such
a value is a comparison of its input with one threshold, which bisection over the floating-point numbers finds exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def first_true(holds: Callable[[torch.Tensor], torch.Tensor], channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the smallest number of each channel for which a condition holds, ``[channels]``.

    Args:
        holds: Takes ``[channels]`` finite numbers, returns bool ``[channels]``; once true it stays true as its number
            grows.
        channels: How many conditions to search at once.
        dtype: The floating-point type of the numbers.

    Returns:
        -inf where the condition always holds, inf where it never does.
    """
    largest = _order(torch.tensor(torch.finfo(dtype).max, dtype=dtype))
    low, high = (-largest).expand(channels).clone(), largest.expand(channels).clone()
    always, never = holds(_number(low, dtype)), ~holds(_number(high, dtype))
    while bool((low < high).any()):
        middle = torch.clamp((low >> 1) + (high >> 1), low, high)  # halves first: the sum of two places may overflow
        found = holds(_number(middle, dtype))
        low, high = torch.where(found, low, middle + 1), torch.where(found, middle, high)
        low = torch.minimum(low, high)
    infinity = torch.tensor(torch.inf, dtype=dtype)
    return torch.where(always, -infinity, torch.where(never, infinity, _number(high, dtype)))


def _order(number: torch.Tensor) -> torch.Tensor:
    """Return the place of a number among all of its type, as int64: 0 for zero, -n for the negative of the n-th."""
    bits = number.view(_INTEGERS[number.dtype.itemsize]).long()
    largest = torch.iinfo(_INTEGERS[number.dtype.itemsize]).max
    return torch.where(bits < 0, -(bits & largest), bits)


def _number(place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the number at a place."""
    number = place.abs().to(_INTEGERS[dtype.itemsize]).view(dtype)
    return torch.where(place < 0, -number, number)
