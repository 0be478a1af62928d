"""What comparing two files value by value asks of a runtime that can tell what a file computes inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Basis = Literal["output", "name", "layer", "position"]


@dataclass(frozen=True)
class Shared:
    """One value of two files.

    Attributes:
        name: Its name before quantization, in the first file.
        first: The value in the first file, as its runtime knows it.
        basis: What tells that they are one: the place among the outputs, the name, the name of the layer they end, or
            the place of that layer.
        layer: The node that computes it: in files of this package the module's path.
        op: That node's operator in the second file.
        stored: Whether the second file stores it as integers.
    """

    name: str
    first: Any
    second: Any
    basis: Basis
    layer: str
    op: str
    stored: bool


class FileValues(ABC):
    """The values a file computes."""

    @abstractmethod
    def shared(self, other: FileValues) -> list[Shared]:
        """Return the values that another file with as many outputs shares, in its order of execution.

        Raises:
            Refused: The files share nothing between inputs and outputs.
        """

    @abstractmethod
    def sources(self, values: Sequence[Any]) -> list[list[int]]:
        """Return for each of some values the places of the nearest ones that it is computed from."""

    @abstractmethod
    def reader(self, values: Sequence[Any]) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
        """Return a function from flat inputs to these values, computed operator by operator, none fused.

        Raises:
            Refused: The runtime cannot run the file that way.
        """
