"""How names in an exported ONNX file lead back to the calls of the program, or to the file's own nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize.profile.join import Calls, calls_of
from optimize.profile.onnx_costs import MULTIPLYING
from optimize.program import Program
from optimize.targets.onnx.reading import read_checked

#: What ONNX Runtime appends to names when it changes a layout or fuses, and OpenVINO when it splits a bias off.
_ENDINGS = re.compile(r"(_token_\d+|_nchwc|/MatMulAddFusion|/WithoutBiases)+$")

_IR_LAYERS = frozenset(
    {
        "Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData", "MatMul",
        "LSTMSequence", "GRUSequence",
    }
)  # fmt: skip


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
        plain = [_ENDINGS.sub("", name) for name in names]
        found = (self.nodes.get(name) or self.values.get(name) for name in plain)
        return tuple(dict.fromkeys(name for name in found if name))


def program_names(program: Program) -> FileNames:
    """Return the names that the ONNX form of a program gives to its calls; OpenVINO's files keep them."""
    from optimize.targets.onnx_graph.export import ORIGIN, to_onnx

    model, values = to_onnx(program)
    nodes = {str(node.name): node.metadata_props[ORIGIN] for node in model.graph if ORIGIN in node.metadata_props}
    return FileNames(calls_of(program), nodes, {value: name for name, value in values.items()})


def onnx_names(path: Path) -> FileNames:
    """Return the nodes of an ONNX file, called by their own names (or by their first output where they have none)."""
    nodes = list(read_checked(path, trust=True).graph.node)  # what it asks for was judged when it was opened
    keys = [node.name or node.output[0] for node in nodes]
    made = {value: key for key, node in zip(keys, nodes, strict=True) for value in node.output if value}
    reads = {
        key: tuple(made[value] for value in node.input if value in made) for key, node in zip(keys, nodes, strict=True)
    }
    layers = frozenset(key for key, node in zip(keys, nodes, strict=True) if node.op_type in MULTIPLYING)
    return FileNames(Calls(reads, layers), {key: key for key in keys}, made)


def ir_names(model: Any) -> FileNames:
    """Return the nodes of an OpenVINO model that depend on its inputs, called by their own names."""
    reads: dict[str, tuple[str, ...]] = {}
    inputs = {node.get_friendly_name() for node in model.get_parameters()}
    layers = set()
    for node in model.get_ordered_ops():
        sources = [port.get_source_output().get_node().get_friendly_name() for port in node.inputs()]
        if node.get_type_name() != "Result" and any(source in reads or source in inputs for source in sources):
            reads[node.get_friendly_name()] = tuple(source for source in sources if source in reads)
            layers |= {node.get_friendly_name()} if node.get_type_name() in _IR_LAYERS else set()
    return FileNames(Calls(reads, frozenset(layers)), {name: name for name in reads}, {})
