"""Compile the program with TorchScript."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from optimize.passes.base import Outcome, Pass, Rewrite, Stage
from optimize.program import Program
from optimize.registry import register_pass
from optimize.scripting import compile_graph


@register_pass
@dataclass(frozen=True)
class Script(Pass):
    """Compile the program with ``torch.jit.script`` and run the compilation from here on.

    The compilation is made from the graph, never by tracing: tracing bakes the batch into a ViT and makes an LSTM abort
    the process at another batch size. The pipeline then compares the compiled outputs with the program's at two batch
    sizes, so what the ``torchscript`` target saves is what was verified.

    What it costs: TorchScript is deprecated upstream; it stays a target because C++ servers load it.

    Raises:
        Refused: TorchScript cannot express an operator; the message names it and the layer.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(8, 4).eval(), (torch.rand(2, 8),))
        >>> program, outcome = Script().apply(program)
        >>> isinstance(program.compiled, torch.jit.ScriptModule)
        True
    """

    stage: ClassVar[Stage] = Stage.SCRIPT

    def rewrite(self, program: Program) -> Outcome:
        """Compile the graph."""
        if program.compiled is not None:
            return Outcome(notes=("The program is compiled already.",))
        if program.quantization is not None:
            return Outcome(notes=("An INT8 program is compiled by the torchscript target, with its integer kernels.",))
        program.compiled = compile_graph(program.graph_module)
        calls = sum(node.op == "call_function" for node in program.graph.nodes)
        return Outcome((Rewrite("program", f"{calls} calls compiled with torch.jit.script"),))
