"""From an ATen graph to TorchScript by scripting, never by tracing: traced files bake the example batch into the code.

``torch.jit.script`` compiles the Python text of a graph module. The graph is first rebuilt in what that language knows:

* an operator overload becomes its packet (``aten.add.Tensor`` -> ``aten.add``): the compiler picks the overload;
* symbolic sizes become sizes (``sym_size`` -> ``size``), ``sym_max`` becomes ``max``;
* what a truth value among numbers makes a number is made bool again;
* devices become their names, non-finite numbers ``float('inf')``, empty lists are annotated as lists of integers;
* a single output leaves its tuple.

Nothing is run, so nothing can abort the process; what the language lacks is refused by name.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optimize import graph
from optimize.errors import Refused
from optimize.graph import aten

#: Namespaces whose operators exist in every process that has imported torch.
_BUILT_IN = ("aten", "quantized")
_COUNTERPARTS: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: aten.size,
    aten.sym_numel.default: aten.numel,
    aten.sym_stride.int: aten.stride,
    aten.sym_storage_offset.default: aten.storage_offset,
    torch.sym_max: max,
    torch.sym_min: min,
}


def compile_graph(module: fx.GraphModule) -> torch.jit.ScriptModule:
    """Compile a graph of ATen and quantized operators to TorchScript; it shares its weights and keeps their keys.

    Returns:
        A module in evaluation mode that takes the flat inputs and returns one tensor, or a flat tuple of them.

    Raises:
        Refused: TorchScript lacks something the graph uses; the message names the operator and the layer.

    Example:
        >>> from optimize.frontend import capture
        >>> program = capture(torch.nn.Linear(3, 2), (torch.zeros(2, 3),))
        >>> compile_graph(program.graph_module)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    plain = _scriptable(module)
    with warnings.catch_warnings(action="ignore"):
        try:
            scripted = torch.jit.script(plain).eval()
        except Exception as error:
            raise _refusal(module, str(error)) from error
    if not isinstance(scripted, torch.jit.ScriptModule):  # torch's switch for debugging makes it hand modules back
        raise Refused("TorchScript is switched off: PYTORCH_JIT=0 is in the environment.", hint="Unset PYTORCH_JIT.")
    return scripted


def _scriptable(module: fx.GraphModule) -> fx.GraphModule:
    """Rebuild a graph in TorchScript's words; the weights are shared."""
    plain = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            values = [copies[value] for value in node.args[0]]
            plain.output(values[0] if len(values) == 1 else tuple(values))
        elif node.op == "call_function":
            copies[node] = _translated(node, plain, copies)
        else:
            copies[node] = plain.node_copy(node, copies.__getitem__)
    _refuse_other_batches(module, plain, copies)
    # The compiler writes both names into the file: by default they tell how much this process has compiled before.
    name = f"Program_{hashlib.sha256(plain.python_code('self').src.encode()).hexdigest()[:12]}"
    plain._co_fields = {"co_filename": f"<fx>.{name}"}
    return fx.GraphModule(module, plain, class_name=name)


def _refuse_other_batches(module: fx.GraphModule, plain: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    """Let a file refuse another batch than a fixed one, which is in its numbers, as those of other runtimes do."""
    with plain.inserting_before(next(node for node in plain.nodes if node.op != "placeholder")):
        for node in module.graph.find_nodes(op="placeholder"):
            size = next(iter(getattr(node.meta.get("val"), "shape", ())), None)
            if isinstance(size, int):
                is_held = plain.call_function(operator.eq, (plain.call_function(aten.size, (copies[node], 0)), size))
                plain.call_function(torch._assert, (is_held, f"The first size of input '{node.name}' must be {size}."))


def _translated(node: fx.Node, plain: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    arguments = tuple(_literal(value, plain, copies) for value in node.args)
    keywords = {name: _literal(value, plain, copies) for name, value in node.kwargs.items() if value is not None}
    copy = plain.create_node("call_function", _callable(node), arguments, keywords, node.name)
    copy.meta = dict(node.meta)
    return plain.call_function(aten.to, (copy, torch.bool)) if _is_made_a_number(node) else copy


def _is_made_a_number(node: fx.Node) -> bool:
    """Say whether a call answers in bool for a truth value among its numbers: TorchScript makes it an integer."""
    value = node.meta.get("val")
    if not (isinstance(node.target, torch._ops.OpOverload) and isinstance(value, torch.Tensor)):
        return False
    given = zip(node.target._schema.arguments, node.args, strict=False)
    return value.dtype == torch.bool and any(
        isinstance(held, bool) and str(argument.type) != "bool" for argument, held in given
    )


def _callable(node: fx.Node) -> Callable[..., Any]:
    """Return what TorchScript calls for a node.

    Raises:
        Refused: The operator exists only where the package that defines it was imported.
    """
    target: Any = node.target
    if target in _COUNTERPARTS:
        return _COUNTERPARTS[target]
    if not isinstance(target, torch._ops.OpOverload):
        return target
    if target.namespace not in _BUILT_IN:
        raise Refused(
            f"TorchScript cannot hold {target} of '{graph.origin(node)}': the file would load only where the package "
            f"that defines '{target.namespace}' was imported first."
        )
    return target.overloadpacket


def _literal(value: Any, plain: fx.Graph, copies: dict[fx.Node, fx.Node]) -> Any:
    """Return an argument as the graph's text can say it in TorchScript."""
    if isinstance(value, fx.Node):
        return copies[value]
    if isinstance(value, list | tuple):
        if not value:
            # The name matters: a variable called 'annotate' would hide the function in the saved code.
            typed: Any = (list[int], [])
            return plain.create_node("call_function", torch.jit.annotate, typed, name="no_sizes")
        return [_literal(item, plain, copies) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return plain.call_function(float, (str(value),))
    return str(value) if isinstance(value, torch.device) else value


def _refusal(module: fx.GraphModule, message: str) -> Refused:
    """Name the operator and the layer: the compiler's message quotes the line, which starts with the node's name."""
    reason = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given").rstrip(".:")
    quoted = re.search(r"^\s*(\w+) = .*\n\s*~+[~\s]*<--- HERE", message, re.MULTILINE)
    nodes = {node.name: node for node in module.graph.nodes}
    node = nodes.get(quoted[1]) if quoted else None
    where = f"{graph.op_name(node)} of '{graph.origin(node)}'" if node else "the program"
    return Refused(f"TorchScript cannot express {where}: {reason}.", hint="Choose another target, such as onnx.")
