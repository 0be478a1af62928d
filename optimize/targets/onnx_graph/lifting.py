"""A program as torch's exporter to ONNX reads it: weights are inputs in front of the others, all else as it stands.

``Program.export`` traces the graph anew, to have what torch promises of an ``ExportedProgram``. The exporter needs the
graph and the list of weights, which are there: half of the time of an export.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.program import Program


def lifted(program: Program) -> torch.export.ExportedProgram:
    """Return a program with its weights as inputs, its nodes by their names; nothing to be traced, run or saved."""
    flow, new, weights = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, torch.Tensor]()
    specs, read = list[InputSpec](), dict[str, fx.Node]()
    for node in program.graph.nodes:
        if node.op != "get_attr":
            continue
        path = str(node.target)
        if path not in read:
            weight = graph.attribute(program.graph_module, path)
            read[path], weights[path] = flow.placeholder(node.name), weight
            read[path].meta = dict(node.meta)
            is_trained = isinstance(weight, torch.nn.Parameter)
            kind, persistent = (InputKind.PARAMETER, None) if is_trained else (InputKind.BUFFER, True)
            specs.append(InputSpec(kind, TensorArgument(read[path].name), path, persistent))
        new[node] = read[path]
    for node in program.graph.nodes:
        if node.op != "get_attr":
            new[node] = flow.node_copy(node, new.__getitem__)
    specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(new[node].name), None) for node in program.placeholders]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(new[node].name), None) for node in program.outputs]
    arranged = pytree.tree_structure((program.inputs, {})), pytree.tree_structure(program.outputs)
    return torch.export.ExportedProgram(
        root=torch.nn.Module(),
        graph=flow,
        graph_signature=ExportGraphSignature(specs, outputs),
        state_dict=weights,
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], *arranged))],
        example_inputs=(program.inputs, {}),
    )
