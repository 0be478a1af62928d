"""What an ONNX file alone tells of a value it computes, and a node as the rules about sizes and numbers see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import AttributeProto, helper

Shape = tuple[int, ...]
Attributes = Mapping[str, AttributeProto]

#: Dimensions of any value: the product of a million sizes takes minutes, and no signal ends it.
MOST_AXES = 64


@dataclass(frozen=True)
class Static:
    """What is known of a value.

    Attributes:
        shape: Its sizes; None where unknown.
        value: The numbers, where they are few and known.
        fixed: Whether it is computed from constants alone, so that a runtime may compute it when it loads the file.
    """

    shape: Shape | None = None
    value: np.ndarray | None = None
    fixed: bool = False


UNKNOWN = Static()


@dataclass(frozen=True)
class NodeView:
    """A node as the rules see it.

    Attributes:
        op: Operator.
        inputs: What it reads; None where an input is left out.
        attributes: By name.
        kinds: Of the numbers that are calculated with, by the letters of numpy; an importer adds symbols ("O").
    """

    kinds: ClassVar[str] = "biuf"
    op: str
    inputs: Sequence[Static | None]
    attributes: Attributes

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute."""
        found = self.attributes.get(name)
        return default if found is None else helper.get_attribute_value(found)

    def shape(self, index: int) -> Shape:
        """Return the sizes of an input; ``KeyError`` where they are unknown."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None or found.shape is None:
            raise KeyError(index)
        return found.shape

    def numbers(self, index: int, name: str = "") -> list[Any]:
        """Return the numbers of an input, or of the attribute that older operator sets have for it."""
        if name and name in self.attributes:
            return list(self.attribute(name))
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None or found.value is None:
            raise KeyError(index)
        return found.value.ravel().tolist()
