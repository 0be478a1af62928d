"""An ONNX graph as a module of torch, which a run starts from; ``torch_operators`` is the table of its operators.

Values are tensors, and numbers that shapes are computed from: NumPy arrays of whole numbers, whose elements may be
symbols while the module is captured, so that a free batch stays free through ``Shape``, ``Gather`` and ``Concat``.
Weights keep the names of their initializers; a call of a layer belongs to the module that its weight's name says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from onnx import helper, numpy_helper

from optimize import graph
from optimize.errors import Refused
from optimize.frontend import ForeignGraph
from optimize.regular import shown
from optimize.targets.onnx.torch_operators import OPERATORS, SMALL, OnnxCall, Unknown, torch_type

_NO_OPSET_BEFORE = 9
_INTEGERS = ("Integer", "QuantizeLinear", "QLinear", "DynamicQuantize", "QGemm", "MatMulNBits")
#: Of a recurrent layer's gates: the place in ONNX's order of each one in torch's.
_ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}
_QUANTIZED_HINT = "Give the float file that it was made from, or the PyTorch model."
_HINT = "Give the PyTorch model it was made from; bench, check, compare and profile run the file as it is."


class _Place(torch.nn.Module):
    """A place for weights, and for the call that belongs to them: its path is where the call comes from."""

    def forward(self, function: Callable[[OnnxCall], Any], call: OnnxCall) -> Any:
        return function(call)


class OnnxGraph(ForeignGraph):
    """An ONNX graph as a module.

    Args:
        model: Read and checked; weights outside the file are read from its folder.
        path: The file.

    Raises:
        Refused: It is quantized, or calls an operator that is not known; the message names it.
    """

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        super().__init__()
        model = onnx.inliner.inline_local_functions(model) if model.functions else model
        self._path, self._model = path, model
        self._opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
        self._refuse_others()
        stored = {tensor.name: numpy_helper.to_array(tensor, str(path.parent)) for tensor in model.graph.initializer}
        nodes = _without_constants(model.graph.node, stored, self._opset)
        self._inputs = [entry for entry in model.graph.input if entry.name not in stored]
        self._outputs = [entry.name for entry in model.graph.output]
        self._numbers = {name: value for name, value in stored.items() if value.size <= SMALL}
        self._weights: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        self._steps = [self._step(node, stored) for node in _linear_layers(nodes, stored, self._outputs)]
        self.eval()
        read = {name for node, _, _ in self._steps for name in node.input} | set(self._outputs)
        for name in sorted(read & stored.keys()):
            self._weights[name] = self._paths.get(name, _path(name))
            self._own(self._weights[name], stored[name])

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
            found.append(noise.to(dtype) if dtype.is_floating_point else torch.zeros(sizes, dtype=dtype))
        return tuple(found)

    def original(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return what ONNX Runtime answers to the file itself; None where it is not installed."""
        try:
            import onnxruntime
        except ImportError:
            return None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(self._path, options, providers=["CPUExecutionProvider"])
        named = {entry.name: value.numpy() for entry, value in zip(self._inputs, inputs, strict=True)}
        return [torch.as_tensor(value) for value in session.run(self._outputs, named)]

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Compute the outputs, in the order of the file."""
        values: dict[str, Any] = {entry.name: value for entry, value in zip(self._inputs, inputs, strict=True)}
        values |= {name: self._value(name) for name in self._weights}
        for node, attributes, scope in self._steps:
            taken = [values[name] if name else None for name in node.input]
            numbers = [self._numbers.get(name) for name in node.input]
            if node.op_type in _ORDERS:
                attributes = attributes | {"weights": [graph.attribute(self, each) for each in attributes["weights"]]}
            call = OnnxCall(node.op_type, attributes, taken, numbers, self._opset, sum(map(bool, node.output)))
            try:
                found = (self.get_submodule(scope) if scope else _run)(OPERATORS[node.op_type], call)
            except Unknown as error:
                raise self._refusal(node, str(error)) from error
            outputs = found if isinstance(found, tuple) else (found,)
            values |= {name: _wrapped(value) for name, value in zip(node.output, outputs, strict=False) if name}
        found = tuple(OnnxCall("", {}, [values[name]], [None], 0, 1).x for name in self._outputs)
        return found[0] if len(found) == 1 else found

    def _value(self, name: str) -> Any:
        """Return a stored value: whole numbers that shapes may be computed from as numbers."""
        known = self._numbers.get(name)
        if known is not None and known.dtype in (np.int64, np.int32) and known.ndim < 2:
            return known.astype(object)
        return graph.attribute(self, self._weights[name])

    def _step(self, node: onnx.NodeProto, stored: dict[str, np.ndarray]) -> tuple[onnx.NodeProto, dict[str, Any], str]:
        """Return a node, its attributes, and the path that its call belongs to."""
        attributes = {entry.name: _attribute(entry) for entry in node.attribute}
        held = next((name for name in node.input[1:2] if name in stored and stored[name].ndim > 1), "")
        scope = ".".join(_path(held).split(".")[:-1]) or (_path(node.name) if held and node.name else "")
        if scope and "." not in _path(held):  # its name tells nothing, that of its layer does
            self._paths.setdefault(held, f"{scope}.weight")
        if node.op_type in _ORDERS:
            attributes |= self._recurrent(node, stored, scope := _path(node.name or node.output[0]))
        if scope:
            self._place(scope)
        return node, attributes, scope

    def _recurrent(self, node: onnx.NodeProto, stored: Mapping[str, np.ndarray], scope: str) -> dict[str, Any]:
        """Keep the weights of a recurrent layer as torch has them, and return what its call needs to know."""
        names = [name for name in node.input[1:4] if name]
        if missing := next((name for name in names if name not in stored), None):
            raise self._refusal(node, f"its weight '{shown(missing)}' is computed")
        w, r, *bias = (stored[name] for name in names)
        paths, order = [], _ORDERS[node.op_type]
        for side in range(len(w)):
            parts = [w[side], r[side], *(np.split(bias[0][side], 2) if bias else ())]
            for kind, part in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), parts, strict=False):
                turned = np.concatenate([np.split(part, len(order))[gate] for gate in order])
                paths.append(f"{scope}.{kind}_l0{'_reverse' if side else ''}")
                self._own(paths[-1], turned)
        given = "activations" in {entry.name for entry in node.attribute}
        usual = [b"Sigmoid", b"Tanh", b"Tanh"][: len(order) - 1]
        said = next((list(entry.strings) for entry in node.attribute if entry.name == "activations"), [])
        del node.input[1:4]
        for _ in range(3):
            node.input.insert(1, "")
        return {"weights": paths, "biased": bool(bias), "activations_given": given and said != usual * len(w)}

    def _own(self, path: str, value: np.ndarray) -> None:
        scope, _, name = path.rpartition(".")
        owner, tensor = self._place(scope), torch.from_numpy(np.array(value))
        if name in owner._modules or name in owner._parameters:
            raise Refused(f"'{shown(self._path)}' has two weights of one path: '{shown(path)}'.", hint=_HINT)
        if tensor.is_floating_point():
            owner.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            owner.register_buffer(name, tensor)

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
        others = {node.op_type for node in self._model.graph.node if node.domain not in ("", "ai.onnx")}
        if missing := sorted({op for op in calls if op not in known or op == "Linear"} | others):
            raise Refused(
                f"'{path}' calls operators of ONNX that are not read: {', '.join(map(shown, missing[:8]))}.",
                hint=_HINT,
            )
        if self._opset < _NO_OPSET_BEFORE or not self._model.graph.output:
            raise Refused(f"'{path}' is of opset {self._opset}; {_NO_OPSET_BEFORE} and later are read.")

    def _refusal(self, node: onnx.NodeProto, reason: str) -> Refused:
        name = shown(node.name or next(iter(node.output), ""))
        return Refused(
            f"'{shown(self._path)}': {node.op_type} '{name}' cannot be read: {reason}.",
            hint=_HINT,
        )


def _wrapped(value: Any) -> Any:
    """Return a tensor as it is, and a number as an array of one."""
    return value if isinstance(value, torch.Tensor | np.ndarray) else np.array(value, object)


def _run(function: Callable[[OnnxCall], Any], call: OnnxCall) -> Any:
    return function(call)


def _without_constants(
    nodes: Sequence[onnx.NodeProto], stored: dict[str, np.ndarray], opset: int
) -> list[onnx.NodeProto]:
    """Return the nodes that depend on an input; what the others compute is added to the stored values."""
    left = []
    for node in nodes:
        if node.op_type == "Constant":
            (entry,) = node.attribute
            value = _attribute(entry)
            kind = np.int64 if "int" in entry.name else np.float32
            stored[node.output[0]] = value if isinstance(value, np.ndarray) else np.array(value, kind)
        elif node.op_type in _ORDERS or not all(name in stored for name in node.input if name):
            left.append(node)
        else:
            known = [stored[name] if name else None for name in node.input]
            values = [None if value is None else torch.from_numpy(np.array(value)) for value in known]
            attributes = {entry.name: _attribute(entry) for entry in node.attribute}
            call = OnnxCall(node.op_type, attributes, values, known, opset, sum(map(bool, node.output)))
            try:
                found = OPERATORS[node.op_type](call)
            except Unknown:  # is told where the graph is run
                left.append(node)
                continue
            outputs = found if isinstance(found, tuple) else (found,)
            stored |= {name: _as_array(value) for name, value in zip(node.output, outputs, strict=False) if name}
    return left


def _as_array(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, torch.Tensor) else np.array(value, np.int64)


def _linear_layers(
    nodes: Sequence[onnx.NodeProto], stored: dict[str, np.ndarray], outputs: Sequence[str]
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes, each product with a stored matrix as one layer with the constant that is added behind it.

    This is what exporters make of a linear layer on more than two dimensions.
    """
    readers = Counter(name for node in nodes for name in node.input) + Counter(outputs)
    adds = {name: node for node in nodes if node.op_type == "Add" for name in node.input}
    done: set[str] = set()
    for node in nodes:
        weight = node.input[1] if node.op_type == "MatMul" else ""
        if node.op_type == "Add" and node.output[0] in done:
            continue
        if weight not in stored or stored[weight].ndim != 2:
            yield node
            continue
        turned, output, add = f"{weight}_turned", node.output[0], adds.get(node.output[0])
        bias = [name for name in add.input if name in stored and stored[name].ndim == 1] if add is not None else []
        turned = weight if readers[weight] == 1 else turned
        stored[turned] = np.ascontiguousarray(stored[weight].T)
        if len(bias) == 1 and readers[output] == 1 and len(stored[bias[0]]) == len(stored[turned]) and add is not None:
            output = add.output[0]
            done.add(output)
        else:
            bias = []
        yield helper.make_node("Linear", [node.input[0], turned, *bias], [output], node.name)


def _attribute(entry: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(entry)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _path(name: str) -> str:
    """Return a name as a path of modules.

    >>> _path("blocks.1.conv.weight"), _path("/layer1/Conv"), _path("onnx::Conv_12")
    ('blocks.1.conv.weight', 'layer1.Conv', 'onnx__Conv_12')
    """
    if re.fullmatch(r"val_\d+", name):  # which torch's exporter calls what it makes up itself
        name = f"stored.{name}"
    parts = (re.sub(r"\W", "_", part, flags=re.ASCII) for part in name.replace("/", ".").split("."))
    return ".".join(part for part in parts if part) or "value"
