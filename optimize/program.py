"""A captured model: an ATen graph that owns its weights, with its example inputs and dynamic dimensions."""

from __future__ import annotations

import copy
import dataclasses
import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.costs import count
from optimize.dimensions import BATCH, FreeSize
from optimize.errors import Refused, first_line, looking_up
from optimize.escaping import plain
from optimize.plan import Quantization
from optimize.records import Stats
from optimize.tracing import light_traces, shape_rules

MAX_BATCH = 4096
_LONGEST_NAME = 64
#: Of a call: the operator, its arguments and the values that its value was computed of, and that value.
_SHAPED_BY = "shaped_by"
_CUT = "Cut it to that (texts: enable_truncation of the tokenizer), or leave it out."
#: What one does who has a module where a program is wanted.
CAPTURE_FIRST = "Capture a module first: optimize.capture(module, inputs)."


@dataclass
class Program:
    """One inference graph on ATen operators.

    Attributes:
        graph_module: The graph: one placeholder an input, flat tuple output, weights as ``get_attr``.
        inputs: Flat example inputs, batch >= 2 where the batch is dynamic.
        dynamic: One mapping {dimension: name} an input.
        in_spec: How the caller's ``(args, kwargs)`` flatten to the inputs.
        out_spec: How the flat outputs unflatten to what the module returned.
        free: The sizes of each free dimension, by name.
        source: The eager module (a copy, in inference mode) until the first graph rewrite, then None.
        quantization: What static or dynamic quantization decided; placed when a target lowers the program.
        compiled: The TorchScript compilation adopted by the ``Script`` pass; run in the graph's place when present.
        notes: What capture had to say, for the report.
        guessed: Which of them says that nobody told what it takes; empty where somebody did.
        applied: The passes that changed it and are applied once: lossy ones, and those that decide by data.
        unquantized: The program as it was before its quantization plan: same node names, weights not yet rounded.
    """

    graph_module: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    dynamic: tuple[dict[int, str], ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    source: torch.nn.Module | None = None
    quantization: Quantization | None = None
    compiled: torch.jit.ScriptModule | None = None
    free: dict[str, FreeSize] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    guessed: str = ""
    applied: tuple[Any, ...] = ()
    unquantized: Program | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Return what it takes and returns, in a line; ``text()`` prints the graph."""
        symbols = self.symbols()
        inputs = ", ".join(f"{node.name} {_type_text(node.meta['val'], symbols)}" for node in self.placeholders)
        calls = sum(node.op == "call_function" for node in self.graph.nodes)
        return f"Program({inputs} -> {', '.join(self.output_names)}; {calls} calls, {self.precision})"

    def _repr_html_(self) -> str:
        """Return the graph as notebooks show it."""
        return f"<pre>{html.escape(self.text())}</pre>"

    @property
    def graph(self) -> fx.Graph:
        """The ATen graph."""
        return self.graph_module.graph

    @property
    def input_names(self) -> tuple[str, ...]:
        """The placeholders' names, in order."""
        return tuple(node.name for node in self.placeholders)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes that stand for the inputs, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def free_places(self) -> Iterator[tuple[fx.Node, int, str]]:
        """Yield placeholder, dimension and name of everything that is free."""
        for node, dims in zip(self.placeholders, self.dynamic, strict=True):
            yield from ((node, dim, name) for dim, name in dims.items())

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes the program returns, flat."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def output_names(self) -> tuple[str, ...]:
        """What the module called its outputs (keys and fields; ``output_0`` and on where it has no words for them)."""
        plain = [f"output_{place}" for place in range(len(self.outputs))]
        named = name_outputs(pytree.tree_unflatten(plain, self.out_spec))
        return tuple(plain) if set(named) & set(self.input_names) else named

    @property
    def batch(self) -> int | None:
        """The example batch size, or None when the batch is fixed."""
        return self.example_sizes().get(BATCH)

    def example_sizes(self) -> dict[str, int]:
        """Return the size of each free dimension in the example inputs, by name."""
        return self.sizes_of(self.inputs)

    def sizes_of(self, flat: Sequence[torch.Tensor]) -> dict[str, int]:
        """Return the size of each free dimension in flat inputs, by name."""
        return {
            name: int(tensor.shape[dim])
            for tensor, dims in zip(flat, self.dynamic, strict=True)
            for dim, name in dims.items()
        }

    @property
    def precision(self) -> str:
        """The quantization plan's (such as ``int8``), or the narrowest float type among the weights."""
        if self.quantization is not None:
            return self.quantization.precision
        weights = (*self.graph_module.parameters(), *self.graph_module.buffers())
        types = {graph.dtype_name(tensor) for tensor in weights}
        return next((name for name in ("bfloat16", "float16", "float32", "float64") if name in types), "float32")

    @property
    def plan(self) -> Quantization:
        """The quantization plan of a program that has one."""
        assert self.quantization is not None
        return self.quantization

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on what the module took; return what the module returned.

        Raises:
            Refused: The inputs do not have the captured structure, shape or dtype.
        """
        flat = self.flatten(args, kwargs)
        return pytree.tree_unflatten(list(self.run(flat)), self.out_spec)

    def run(self, flat: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run on flat inputs without gradients; return the flat outputs; refuse rows that a table does not have."""
        with looking_up(), torch.inference_mode():
            result = (self.compiled or self.graph_module)(*flat)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> tuple[torch.Tensor, ...]:
        """Flatten the caller's arguments in the captured order and check them.

        Raises:
            Refused: Structure, shape or dtype differ from the captured ones.
        """
        given = (args, dict(kwargs or {}))
        try:
            flat = self.in_spec.flatten_up_to(given)
        except ValueError as error:
            count, names = len(pytree.tree_leaves(given)), self.input_names
            parts = pytree.tree_unflatten(list(names), self.in_spec)
            arranged = f"arranged otherwise than at capture, {' and '.join(map(str, filter(None, parts)))}"
            got = count if count != len(names) else arranged
            raise Refused(f"The program takes {len(names)} input(s) {names}; got {got}.") from error
        for name, value, example, dims in zip(self.input_names, flat, self.inputs, self.dynamic, strict=True):
            _check_input(name, value, example, dims)
        self.require_sizes(flat)
        return tuple(flat)

    def require_sizes(self, flat: Sequence[torch.Tensor]) -> None:
        """Check that the model takes the sizes of flat inputs, of whatever is free besides the batch.

        Raises:
            Refused: It computes otherwise with one, or fails.
        """
        for name, value, dims in zip(self.input_names, flat, self.dynamic, strict=True):
            for dim, word in dims.items():
                if word != BATCH and word in self.free and not self.free[word].holds(size := int(value.shape[dim])):
                    raise Refused(f"Input '{name}' has {size} for '{word}', which may be {self.free[word]}.", hint=_CUT)

    def tell_bounds(self, asked: Mapping[str, FreeSize]) -> list[str]:
        """Return what is to be said of the largest sizes that the model takes, but for those that are asked."""
        known = {
            BATCH: max(MAX_BATCH, self.samples),
            **{name: size.most for name, size in asked.items() if size.most is not None},
        }
        return [
            f"'{name}' may be {size.most} at most: beyond, it fails or computes otherwise, and no file checks it."
            for name, size in self.free.items()
            if size.most not in (None, known.get(name))
        ]

    def sample(self, batch: int, *, first: int = 0) -> tuple[torch.Tensor, ...]:
        """Return flat inputs of another batch size, cycling through the example inputs; those where it is fixed."""
        return self.resized({BATCH: batch}, first=first)

    def resized(self, sizes: Mapping[str, int], *, first: int = 0) -> tuple[torch.Tensor, ...]:
        """Return flat inputs of other sizes of free dimensions, by name, made by cycling through the example inputs.

        They begin with the entry ``first`` of each of these dimensions.
        """
        return tuple(
            _cycled(tensor, {dim: sizes[name] for dim, name in dims.items() if name in sizes}, first)
            for tensor, dims in zip(self.inputs, self.dynamic, strict=True)
        )

    def at(self, sizes: Mapping[str, int]) -> Program:
        """Return the program with example inputs of these sizes of free dimensions, by name; itself if it has them."""
        if sizes.items() <= self.example_sizes().items():
            return self
        found = dataclasses.replace(self.clone(), inputs=self.resized(sizes))
        found.give_shapes()
        found.refresh()
        return found

    def fixed(self, batch: int) -> Program:
        """Return the program for one batch alone."""
        dims = tuple({dim: name for dim, name in entry.items() if name != BATCH} for entry in self.dynamic)
        free = {name: size for name, size in self.free.items() if name != BATCH}
        found = dataclasses.replace(self.clone(), inputs=self.sample(batch), dynamic=dims, free=free)
        found.give_shapes()
        found.refresh()
        return found

    def other_sizes(self) -> list[dict[str, int]]:
        """Return other sizes than the examples', of free dimensions by name, at which it has answered as its module."""
        free = {name: size.others for name, size in self.free.items() if size.others}
        return [
            {name: others[min(place, len(others) - 1)] for name, others in free.items()}
            for place in range(max(map(len, free.values()), default=0))
        ]

    def clone(self) -> Program:
        """Return a program that shares nothing mutable with this one (the eager source is never written to)."""
        return dataclasses.replace(
            self,
            graph_module=copy.deepcopy(self.graph_module),
            dynamic=tuple(dict(dims) for dims in self.dynamic),
            free=dict(self.free),
            notes=list(self.notes),
        )

    def give_shapes(self) -> None:
        """Give each placeholder a value of its example's shape, free dimensions of one name one symbol."""
        # As long an import as that of torch, and nothing for who only runs files.
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        shapes = ShapeEnv(duck_shape=False)
        # Without a rule of shapes an operator would run, before it is known whether its arguments fit.
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, allow_fallback_kernels=False)
        symbols: dict[str, Any] = {}
        for name, size in self.example_sizes().items():
            symbol = shapes.create_symbol(size, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
            symbols[name] = shapes.create_symintnode(symbol, hint=size, source=ConstantSource(name))
        for node, tensor, dims in zip(self.placeholders, self.inputs, self.dynamic, strict=True):
            sizes = [symbols[dims[dim]] if dim in dims else size for dim, size in enumerate(tensor.shape)]
            with mode:
                node.meta["val"] = torch.empty(sizes, dtype=tensor.dtype)

    def refresh(self, check: Callable[[fx.Node], None] | None = None) -> None:
        """Remove what is unused and recompute the shape and dtype of every value; call after rewriting the graph.

        Args:
            check: Called with each node when the shapes of its arguments are known, and before it is computed.
        """
        graph.remove_unused(self.graph_module)
        _propagate_shapes(self, check)

    def export(self) -> torch.export.ExportedProgram:
        """Re-export the graph with its dynamic dimensions.

        Raises:
            Refused: torch.export does not accept the graph.
        """
        named = {name: self._dim(name) for name in self.free}
        loose = {name: dim if name == BATCH else torch.export.Dim.DYNAMIC for name, dim in named.items()}
        for dims in (named,) if loose == named else (named, loose):
            shapes = tuple({dim: dims[name] for dim, name in entry.items()} for entry in self.dynamic)
            try:
                with shape_rules(), light_traces():
                    return torch.export.export(self.graph_module, self.inputs, dynamic_shapes=shapes, strict=False)
            except Exception as error:  # where not every size of a range fits, such as multiples of 8 alone
                failure = error
        raise Refused(f"The program cannot be re-exported: {first_line(failure)}") from failure

    def _dim(self, name: str) -> Any:
        size = self.free[name]
        return torch.export.Dim(name, min=size.least, **({} if size.most is None else {"max": size.most}))

    def stats(self) -> Stats:
        """Count operators, parameters, weight bytes, MACs (layers, matrix products, attention) and bytes moved."""
        return count(self)

    @property
    def samples(self) -> int:
        """The samples in the example inputs: the free batch, or the leading dimension of a fixed one, else 1."""
        leading = [int(tensor.shape[0]) for tensor in self.inputs if tensor.dim()]
        return self.batch or (leading[0] if leading else 1)

    def text(self) -> str:
        """Print the graph, a line a node, stable over runs: name, dtype, shape, operator, arguments."""
        symbols = self.symbols()
        lines = [plain(_text_line(node, self.graph_module, symbols)) for node in self.graph.nodes]
        if self.quantization is not None:
            lines.append(f"quantization: {self.quantization.text()}")
        return "\n".join(lines) + "\n"

    def symbols(self) -> dict[str, str]:
        """Return the name of each free dimension by the symbol that stands for it in shapes."""
        return {str(node.meta["val"].shape[dim]): name for node, dim, name in self.free_places()}

    def check(self) -> None:
        """Check the invariants.

        Raises:
            VerificationFailed: One is broken; the message names it.
        """
        from optimize.invariants import check

        check(self)


def name_outputs(outputs: Any) -> tuple[str, ...]:
    """Return the names of what a module returned, flat; ``output_0`` and on where it has no words for them.

    >>> name_outputs({"scores": 0, "boxes": (1, 2)}), name_outputs((0, 1))
    (('scores', 'boxes_0', 'boxes_1'), ('output_0', 'output_1'))
    """
    plain = tuple(f"output_{place}" for place in range(len(pytree.tree_leaves(outputs))))
    try:
        paths, _ = pytree.tree_flatten_with_path(outputs)
    except ValueError:  # a class of its own holds them, and tells no names
        return plain
    named = tuple(_path_name(path) or name for (path, _), name in zip(paths, plain, strict=True))
    return named if len(set(named)) == len(named) else plain


def step_of(key: Any) -> Any:
    """Return the key, the field or the place that one step to a value goes by."""
    return getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))


def _path_name(path: Sequence[Any]) -> str:
    """Return the words on the way to a value, one behind the other; empty where there are none.

    >>> from torch.utils._pytree import MappingKey, SequenceKey
    >>> _path_name([MappingKey("boxes"), SequenceKey(1)]), _path_name([SequenceKey(0), SequenceKey(1)])
    ('boxes_1', '')
    """
    steps = [step_of(key) for key in path]
    if not any(isinstance(step, str) for step in steps):
        return ""
    name = re.sub(r"\W+", "_", "_".join(map(str, steps)), flags=re.ASCII)[:_LONGEST_NAME]
    return f"output_{name}" if name[:1].isdecimal() else name


def _cycled(tensor: torch.Tensor, sizes: Mapping[int, int], first: int = 0) -> torch.Tensor:
    """Return a tensor of other sizes, by dimension, made by cycling through what is there."""
    for dim, size in sizes.items():
        tensor = tensor.index_select(dim, torch.arange(first, first + size) % tensor.shape[dim])
    return tensor


def tensor_value(node: fx.Node) -> torch.Tensor | None:
    """Return the fake tensor that carries a node's shape and dtype, or None for a non-tensor value."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_one_position(node: fx.Node) -> bool:
    """Say whether a node's value is channels at a single place, ``[N, C, 1, ...]`` or ``[N, C]``; not a free size."""
    value = tensor_value(node)
    return value is not None and value.dim() > 1 and all(isinstance(n, int) and n == 1 for n in value.shape[2:])


def _check_input(name: str, value: Any, example: torch.Tensor, dims: Mapping[int, str]) -> None:
    expected = [dims.get(dim, size) for dim, size in enumerate(example.shape)]
    if not isinstance(value, torch.Tensor):
        raise Refused(f"Input '{name}' must be a tensor {expected}; got {type(value).__name__}.")
    fits = value.dim() == example.dim() and all(
        isinstance(want, str) or want == got for want, got in zip(expected, value.shape, strict=True)
    )
    if not fits:
        raise Refused(f"Input '{name}' must have shape {expected}; got {list(value.shape)}.")
    if value.dtype != example.dtype:
        raise Refused(f"Input '{name}' must be {example.dtype}; got {value.dtype}.")


def _is_like(fake: FakeTensor, weight: torch.Tensor) -> bool:
    return (fake.shape, fake.dtype, fake.stride()) == (weight.shape, weight.dtype, weight.stride())


class _ShapePropagation(fx.Interpreter):
    """Runs what changed of a graph on fake tensors and writes each value's shape and dtype into ``meta['val']``."""

    def __init__(self, module: fx.GraphModule, mode: FakeTensorMode, check: Callable[[fx.Node], None] | None) -> None:
        super().__init__(module)
        self.mode, self.check = mode, check
        self.fakes: dict[int, FakeTensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if self.check is not None:
            self.check(n)
        if n.op == "get_attr":
            n.meta["val"] = self._weight(n)
        elif n.op == "call_function":
            n.meta["val"] = self._computed(n)
        else:
            return super().run_node(n)
        return n.meta["val"]

    def _weight(self, node: fx.Node) -> FakeTensor:
        """Return the fake of a weight: that which it had, unless it became another."""
        weight, known = super().run_node(node), node.meta.get("val")
        if isinstance(known, FakeTensor) and known.fake_mode is self.mode and _is_like(known, weight):
            return self.fakes.setdefault(id(weight), known)
        return self.fakes.setdefault(id(weight), self.mode.from_tensor(weight, static_shapes=True))

    def _computed(self, node: fx.Node) -> Any:
        """Return the value of a call: that which it had, unless it is another call or reads other values.

        A pass rewrites a few nodes of hundreds, and torch takes as long to see a shape as to run a small layer.
        """
        read = list[Any]()
        said = repr(fx.node.map_arg((node.args, node.kwargs), lambda source: read.append(self.env[source]) or "%"))  # type: ignore[func-returns-value]
        target, known_said, known_read, value = node.meta.get(_SHAPED_BY, (None, "", (), None))
        is_known = (target, known_said, len(known_read)) == (node.target, said, len(read))
        if not is_known or any(one is not other for one, other in zip(known_read, read, strict=True)):
            value = super().run_node(node)
            node.meta[_SHAPED_BY] = (node.target, said, tuple(read), value)
        return value


def _propagate_shapes(program: Program, check: Callable[[fx.Node], None] | None = None) -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fakes = [node.meta["val"] for node in program.placeholders]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(shape_env=ShapeEnv(), allow_fallback_kernels=False)
    # Composite operators (LSTM) have symbolic-shape rules in Python only.
    with mode, torch.no_grad(), enable_python_dispatcher(), shape_rules():
        _ShapePropagation(program.graph_module, mode, check).run(*fakes, enable_io_processing=False)


def _type_text(value: torch.Tensor, symbols: Mapping[str, str]) -> str:
    sizes = [symbols.get(str(size), str(size)) for size in value.shape]
    return f"{graph.dtype_name(value)}[{', '.join(sizes)}]"


def _text_line(node: fx.Node, module: fx.GraphModule, symbols: Mapping[str, str]) -> str:
    if node.op == "output":
        return f"return {', '.join(str(value) for value in node.args[0])}"  # type: ignore[union-attr]
    if node.op == "get_attr":
        tensor = graph.attribute(module, str(node.target))
        return f"{node.name}: {graph.dtype_name(tensor)}{list(tensor.shape)} = weight {node.target}"
    value = tensor_value(node)
    shape = "" if value is None else f": {_type_text(value, symbols)}"
    if node.op == "placeholder":
        return f"{node.name}{shape} = input"
    keywords = [f"{key}={item}" for key, item in node.kwargs.items()]
    return f"{node.name}{shape} = {graph.op_name(node)}({', '.join([*map(str, node.args), *keywords])})"
