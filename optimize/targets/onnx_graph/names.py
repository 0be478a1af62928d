"""How names in an exported ONNX file, and in what runtimes make of it, lead back to the calls of the program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.probe import Calls

#: What ONNX Runtime appends to names when it changes a layout or fuses, and OpenVINO when it splits a bias off.
_ENDINGS = re.compile(r"(_token_\d+|_nchwc|/MatMulAddFusion|/WithoutBiases)+$")


@dataclass(frozen=True)
class FileNames:
    """The calls of a graph, and what a file calls them.

    Attributes:
        calls: The graph: of the program where there is one, else of the file.
        origins: Call by the name of a node in the file, or of a value that it computes.
    """

    calls: Calls
    origins: Mapping[str, str]

    def claimed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the calls that some names of a runtime stand for, endings dropped."""
        found = (self.origins.get(name) for name in map(plain_name, names))
        return tuple(dict.fromkeys(name for name in found if name))


def plain_name(name: str) -> str:
    """Return a name as the file has it.

    >>> plain_name("conv_nchwc"), plain_name("conv_token_3")
    ('conv', 'conv')
    """
    return _ENDINGS.sub("", name)


def origins_in(model: ir.Model, values: Mapping[str, str]) -> dict[str, str]:
    """Return the call of the program that each node and value of its ONNX form is, by name, nodes before values.

    Args:
        model: As ``to_onnx`` returned it; OpenVINO's files keep its names.
        values: What it returned beside it.
    """
    nodes = {str(node.name): node.metadata_props[ORIGIN] for node in model.graph if ORIGIN in node.metadata_props}
    return {**{value: name for name, value in values.items()}, **nodes}
