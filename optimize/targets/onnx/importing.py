"""An ONNX graph as a module of torch, which a run starts from; ``torch_operators`` is the table of its operators.

Values are tensors, and numbers that shapes are computed from: NumPy arrays of whole numbers, whose elements may be
symbols while the module is captured, so that a free batch stays free through ``Shape``, ``Gather`` and ``Concat``.
Weights keep the names of their initializers; a call of a layer belongs to the module that its weight's name says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from onnx import helper, numpy_helper

from optimize import graph
from optimize.errors import Refused, TargetUnavailable
from optimize.frontend_graphs import ForeignGraph
from optimize.regular import shown
from optimize.targets.onnx.runner import import_runtime, open_session, session_options
from optimize.targets.onnx.torch_operators import OPERATORS, OnnxCall, Unknown, apply, as_tensor, torch_type
from optimize.targets.onnx.untrusted.tensors import load_outside

_NO_OPSET_BEFORE = 9
#: The names of ONNX's own domain.
_OWN = ("", "ai.onnx")
#: How domains begin in which a runtime has operators of its own, which go before functions of a file.
_RUNTIMES = ("ai.onnx", "com.microsoft")
#: Numbers of a small array: what axes, sizes and bounds are made of.
_SMALL = 64
_INTEGERS = ("Integer", "QuantizeLinear", "QLinear", "DynamicQuantize", "QGemm", "MatMulNBits")
#: Of a recurrent layer's gates: the place in ONNX's order of each one in torch's.
_ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}
_QUANTIZED_HINT = "Give the float file that it was made from, or the PyTorch model."
_HINT = "Give the PyTorch model it was made from; bench, check, compare and profile run the file as it is."


class _Place(torch.nn.Module):
    """A place for weights, and for the call that belongs to them: its path is where the call comes from."""

    def forward(self, call: OnnxCall) -> tuple[Any, ...]:
        return apply(call)


class OnnxGraph(ForeignGraph):
    """An ONNX graph as a module.

    Args:
        model: Read and checked; weights outside the file are read from its folder.

    Raises:
        Refused: It is quantized, or calls an operator that is not known; the message names it.
    """

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        super().__init__()
        if hidden := next((each.name for each in model.functions if each.domain.startswith(_RUNTIMES)), None):
            raise Refused(
                f"'{shown(path)}' has a function by the name of an operator of a runtime, '{shown(hidden)}'.",
                hint=_HINT,
            )
        self._path, self._model = path, onnx.inliner.inline_local_functions(model) if model.functions else model
        self._opset = next((entry.version for entry in self._model.opset_import if entry.domain in _OWN), 1)
        self._refuse_others()
        graph_ = self._model.graph
        self._names = {name for node in graph_.node for name in node.output}
        self._names |= {entry.name for entry in (*graph_.input, *graph_.initializer)}
        attributes = (attribute.t for node in graph_.node for attribute in node.attribute)
        load_outside((*graph_.initializer, *attributes), path.parent)
        stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph_.initializer}
        stored |= {each.values.name: np.array(each, object) for each in graph_.sparse_initializer}
        self._inputs = [entry for entry in graph_.input if entry.name not in stored]
        self._outputs = [entry.name for entry in graph_.output]
        nodes = list(self._as_torch_has_them(_without_constants(graph_.node, stored, self._opset), stored))
        self._read = read = {name for node in nodes for name in node.input} | set(self._outputs)
        if other := next((name for name in sorted(read & stored.keys()) if not _is_numbers(stored[name])), None):
            raise Refused(
                f"'{shown(path)}' stores '{shown(other)}' as text, sparse, or in a type not read.", hint=_HINT
            )
        self._known = {name: value for name, value in stored.items() if name in read and value.size <= _SMALL}
        self._numbers = {
            name: value for name, value in self._known.items() if value.dtype in (np.int64, np.int32) and value.ndim < 2
        }
        paths = {name: _path(name) for name in sorted(read & stored.keys() - self._numbers.keys())}
        self._steps = [(node, self._scope(node, stored, paths)) for node in nodes]
        for name, place in paths.items():
            self._own(place, stored[name])
        self._weights = paths
        self.eval()

    @property
    def free_batch(self) -> bool:
        """Whether the file leaves the first dimension of every input free."""
        shapes = [entry.type.tensor_type.shape.dim for entry in self._inputs]
        return all(not dims or not dims[0].HasField("dim_value") for dims in shapes)

    def examples(self, batch: int) -> tuple[torch.Tensor, ...] | None:
        """Return inputs of the sizes that the file says, noise and zeros; None where it leaves others free."""
        generator, found = torch.Generator().manual_seed(0), []
        for entry in self._inputs:
            kind = entry.type.tensor_type
            sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in kind.shape.dim]
            sizes = [batch if place == 0 and not size else size for place, size in enumerate(sizes)]
            if 0 in sizes:
                return None
            dtype = torch_type(kind.elem_type)
            noise = torch.randn(sizes, generator=generator)
            truths = torch.full(sizes, dtype is torch.bool, dtype=dtype)  # a mask of nothing would hide everything
            found.append(noise.to(dtype) if dtype.is_floating_point else truths)
        return tuple(found)

    def original(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return what ONNX Runtime answers to the file itself; None where it is not installed."""
        try:
            runtime = import_runtime()
        except TargetUnavailable:
            return None
        session = open_session(runtime, str(self._path), session_options(runtime, threads=1))
        named = {entry.name: value.numpy() for entry, value in zip(self._inputs, inputs, strict=True)}
        return [torch.as_tensor(value) for value in session.run(self._outputs, named)]

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Compute the outputs, in the order of the file."""
        values: dict[str, Any] = {entry.name: value for entry, value in zip(self._inputs, inputs, strict=True)}
        values |= self._numbers | {name: graph.attribute(self, path) for name, path in self._weights.items()}
        for node, scope in self._steps:
            try:
                call = OnnxCall.of(node, values, self._known, self._opset)
                found = self.get_submodule(scope)(call) if scope else apply(call)
            except Unknown as error:
                raise self._refusal(node, str(error)) from error
            if missing := next((name for name in node.output[len(found) :] if name in self._read), None):
                raise self._refusal(node, f"its output '{shown(missing)}' is not read")
            values |= zip(node.output, found, strict=False)
        outputs = tuple(as_tensor(values[name]) for name in self._outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _scope(self, node: onnx.NodeProto, stored: Mapping[str, np.ndarray], paths: dict[str, str]) -> str:
        """Return the path that a call belongs to, a module made there, and let its weight have one below it."""
        first = 8 if node.op_type in _ORDERS else 1
        held = next((name for name in node.input[first : first + 1] if name in stored and stored[name].ndim > 1), "")
        scope = _path(held).rpartition(".")[0] if held else ""
        if held and node.name and not scope:  # its name tells nothing, that of its layer does
            scope = _path(node.name)
            if paths.get(held) == _path(held):
                paths[held] = f"{scope}.weight"
        if scope:
            self._place(scope)
        return scope

    def _as_torch_has_them(
        self, nodes: Sequence[onnx.NodeProto], stored: dict[str, np.ndarray]
    ) -> Iterator[onnx.NodeProto]:
        """Yield the nodes, their weights turned as torch has them.

        A product with a stored matrix is one layer with the constant that is added behind it: exporters make that of a
        linear layer on more than two dimensions. Weights of a recurrent layer are its inputs from the ninth on.
        """
        readers = Counter(name for node in nodes for name in node.input) + Counter(self._outputs)
        adds = {name: node for node in nodes if node.op_type == "Add" for name in node.input}
        done: set[str] = set()
        for node in nodes:
            weight = node.input[1] if node.op_type == "MatMul" else ""
            if node.op_type in _ORDERS:
                yield self._recurrent(node, stored)
            elif weight in stored and stored[weight].ndim == 2:
                turned = weight if readers[weight] == 1 else self._free(f"{weight}_turned")
                stored[turned] = np.ascontiguousarray(stored[weight].T)
                output, add = node.output[0], adds.get(node.output[0])
                inputs = [] if add is None or readers[output] > 1 else list(add.input)
                bias = [name for name in inputs if name in stored and stored[name].shape == stored[turned].shape[:1]]
                if add is not None and len(bias) == 1:
                    output = add.output[0]
                    done.add(output)
                yield helper.make_node("Linear", [node.input[0], turned, *bias[:1]], [output], node.name)
            elif node.op_type != "Add" or node.output[0] not in done:
                yield node

    def _recurrent(self, node: onnx.NodeProto, stored: dict[str, np.ndarray]) -> onnx.NodeProto:
        if missing := next((name for name in node.input[1:4] if name and name not in stored), None):
            raise self._refusal(node, f"its weight '{shown(missing)}' is computed")
        w, r, *bias = (stored[name] for name in node.input[1:4] if name)
        scope, order, names = _path(node.name or node.output[0]), _ORDERS[node.op_type], []
        for side in range(len(w)):
            parts = [w[side], r[side], *(np.split(bias[0][side], 2) if bias else ())]
            for kind, part in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), parts, strict=False):
                names.append(self._free(f"{scope}/{kind}_l0{'_reverse' if side else ''}"))
                stored[names[-1]] = np.concatenate([np.split(part, len(order))[gate] for gate in order])
        made = onnx.NodeProto()
        made.CopyFrom(node)
        del made.input[:]
        rest = (*node.input[4:], *[""] * 4)[:4]
        made.input.extend([node.input[0], "", "", "", *rest, *names])
        return made

    def _free(self, name: str) -> str:
        """Return a name that nothing in the file has, nor anything made before."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def _own(self, path: str, value: np.ndarray) -> None:
        if hasattr(self._place(path.rpartition(".")[0]), path.rpartition(".")[2]):
            raise Refused(f"'{shown(self._path)}' has two weights of one path: '{shown(path)}'.", hint=_HINT)
        graph.own(self, path, as_tensor(value))

    def _place(self, path: str) -> torch.nn.Module:
        """Return the module at a path, made where it is missing."""
        owner: torch.nn.Module = self
        for part in filter(None, path.split(".")):
            if part not in owner._modules:
                owner.add_module(part, _Place())
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner

    def _refuse_others(self) -> None:
        """Refuse what is quantized, and operators that are not known, all of them by name.

        Raises:
            Refused: There are some.
        """
        path, calls = shown(self._path), Counter(node.op_type for node in self._model.graph.node)
        if integers := next((op for op in calls if any(word in op for word in _INTEGERS)), None):
            raise Refused(f"'{path}' is quantized already (it calls {shown(integers)}).", hint=_QUANTIZED_HINT)
        known = OPERATORS.keys() | {"Constant"}
        others = {node.op_type for node in self._model.graph.node if node.domain not in _OWN}
        if missing := sorted({op for op in calls if op not in known or op == "Linear"} | others):
            named = ", ".join(map(shown, missing[:8]))
            raise Refused(f"'{path}' calls operators of ONNX that are not read: {named}.", hint=_HINT)
        if len(opsets := {entry.version for entry in self._model.opset_import if entry.domain in _OWN}) > 1:
            raise Refused(f"'{path}' says that it is of several opsets: {sorted(opsets)}.", hint=_HINT)
        if self._opset < _NO_OPSET_BEFORE:
            raise Refused(f"'{path}' is of opset {self._opset}; {_NO_OPSET_BEFORE} and later are read.", hint=_HINT)
        if not self._model.graph.output:
            raise Refused(f"'{path}' has no outputs: it computes nothing.", hint="Name them when it is exported.")

    def _refusal(self, node: onnx.NodeProto, reason: str) -> Refused:
        name = shown(node.name or next(iter(node.output), ""))
        return Refused(f"'{shown(self._path)}': {node.op_type} '{name}' cannot be read: {reason}.", hint=_HINT)


def _is_numbers(value: np.ndarray) -> bool:
    """Say whether a value is of a type of numpy's own: no text, nothing sparse, no floats of eight bits."""
    return value.dtype.isbuiltin == 1 and value.dtype != object


def _without_constants(
    nodes: Sequence[onnx.NodeProto], stored: dict[str, np.ndarray], opset: int
) -> list[onnx.NodeProto]:
    """Return the nodes that depend on an input; what the others compute is added to the stored values."""
    left = []
    for node in nodes:
        if node.op_type == "Constant":
            value, name = helper.get_attribute_value(node.attribute[0]), node.attribute[0].name
            is_tensor = isinstance(value, onnx.TensorProto)
            kind = np.int64 if "int" in name else np.float32 if "float" in name else object
            stored[node.output[0]] = numpy_helper.to_array(value) if is_tensor else np.array(value, kind)
            continue
        are_numbers = all(name in stored and _is_numbers(stored[name]) for name in node.input if name)
        if node.op_type not in _ORDERS and are_numbers:
            try:
                found = apply(OnnxCall.of(node, stored, stored, opset))
            except Unknown:  # is told where the graph is run
                pass
            else:
                arrays = (value.numpy() if isinstance(value, torch.Tensor) else value for value in found)
                stored |= zip(node.output, arrays, strict=False)
                if len(found) >= len(node.output):  # one that is missing is told where the graph is run too
                    continue
        left.append(node)
    return left


#: What a module has already: no weight can go by such a name.
_ANY = _Place()


def _path(name: str) -> str:
    """Return a name as a path of modules.

    >>> _path("blocks.1.conv.weight"), _path("/layer1/Conv"), _path("onnx::Conv_12")
    ('blocks.1.conv.weight', 'layer1.Conv', 'onnx__Conv_12')
    """
    if re.fullmatch(r"val_\d+", name):  # which torch's exporter calls what it makes up itself
        name = f"stored.{name}"
    parts = (re.sub(r"\W", "_", part, flags=re.ASCII) for part in name.replace("/", ".").split("."))
    return ".".join(f"{part}_" if hasattr(_ANY, part) else part for part in parts if part) or "value"
