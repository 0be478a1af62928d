"""How names in an exported ONNX file, and in what runtimes make of it, lead back to the calls of the program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from optimize.program import Program
from optimize.targets.onnx_graph.export import ORIGIN, to_onnx
from optimize.targets.probe import Calls, calls_of

#: What ONNX Runtime appends to names when it changes a layout or fuses, and OpenVINO when it splits a bias off.
_ENDINGS = re.compile(r"(_token_\d+|_nchwc|/MatMulAddFusion|/WithoutBiases)+$")


@dataclass(frozen=True)
class FileNames:
    """The calls of a graph, and what a file calls them.

    Attributes:
        calls: The graph: of the program where there is one, else of the file.
        nodes: Call by the name of a node in the file.
        values: Call by the name of the value it computes in the file.
    """

    calls: Calls
    nodes: Mapping[str, str]
    values: Mapping[str, str]

    def claimed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the calls that some names of a runtime stand for, nodes before values, endings dropped."""
        found = (self.nodes.get(name) or self.values.get(name) for name in map(plain_name, names))
        return tuple(dict.fromkeys(name for name in found if name))


def plain_name(name: str) -> str:
    """Return a name as the file has it.

    >>> plain_name("conv_nchwc"), plain_name("conv_token_3")
    ('conv', 'conv')
    """
    return _ENDINGS.sub("", name)


def program_names(program: Program) -> FileNames:
    """Return the names that the ONNX form of a program gives to its calls; OpenVINO's files keep them."""
    model, values = to_onnx(program)
    nodes = {str(node.name): node.metadata_props[ORIGIN] for node in model.graph if ORIGIN in node.metadata_props}
    return FileNames(calls_of(program), nodes, {value: name for name, value in values.items()})
