"""What a network of ``benchmarks.any_model`` is and takes, drawn from a seed."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

#: Length of sequences where nobody asks for another.
LENGTH = 64
#: The word for a length in shapes, and for the free dimension.
SEQUENCE = "sequence"


@dataclass(frozen=True)
class Field:
    """One input.

    Attributes:
        shape: Of one sample; ``"sequence"`` stands for a length.
        rows: How many tokens there are; 0 for numbers, of a normal distribution.
        ones: Whether it is a mask without holes.
        ordered: Whether tokens rise along the last dimension, as the corners of a box do.
    """

    shape: tuple[int | str, ...]
    rows: int = 0
    ones: bool = False
    ordered: bool = False

    def draw(self, batch: int, length: int, draws: torch.Generator) -> torch.Tensor:
        """Return ``[batch, *shape]``."""
        sizes = (batch, *(length if size == SEQUENCE else int(size) for size in self.shape))
        if self.ones:
            return torch.ones(sizes, dtype=torch.int64)
        if self.rows:
            drawn = torch.randint(0, self.rows, sizes, generator=draws)
            return drawn.sort(-1).values if self.ordered else drawn
        return torch.randn(sizes, generator=draws)


@dataclass(frozen=True)
class Net:
    """A network and what it takes."""

    module: nn.Module
    fields: tuple[Field, ...]

    def draw(self, batch: int, *, seed: int, length: int = LENGTH) -> tuple[torch.Tensor, ...]:
        """Return inputs of a batch size, the same ones for the same seed."""
        draws = torch.Generator().manual_seed(seed)
        return tuple(field.draw(batch, length, draws) for field in self.fields)

    @property
    def free_lengths(self) -> dict[str, dict[int, str]]:
        """The dimensions that hold a sequence's length, by the names of the inputs."""
        names = list(inspect.signature(self.module.forward).parameters)
        lengths = [
            {place: SEQUENCE for place, size in enumerate(field.shape, 1) if size == SEQUENCE} for field in self.fields
        ]
        return {name: dims for name, dims in zip(names, lengths, strict=False) if dims}


def numbers(*shape: int | str) -> Field:
    """Return a field of normal numbers."""
    return Field(shape)


def tokens(rows: int, *shape: int | str) -> Field:
    """Return a field of tokens below ``rows``."""
    return Field(shape or (SEQUENCE,), rows)


MASK = Field((SEQUENCE,), ones=True)
TEXT = (tokens(1000), MASK)
PICTURE = (numbers(3, 64, 64),)
