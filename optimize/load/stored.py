"""A captured program in a folder as plain data: how it leaves the confined process, and enters the user's."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import fx

from optimize import bounds, graph
from optimize.costs import UNASKED_BATCH
from optimize.dimensions import BATCH, FreeSize
from optimize.errors import OptimizeError, Refused, first_line
from optimize.load import misfits, operators
from optimize.load.description import (
    NAME,
    Description,
    Malformed,
    OperatorCall,
    build,
    checked,
    describe,
    read_tree,
    write_tree,
)
from optimize.load.indices import keep_within
from optimize.program import Program
from optimize.sandbox import left_in

_GRAPH_FILE, _TENSORS_FILE = "program.json", "program.safetensors"
#: A graph of 10,000 calls takes 5 MB, and 100 MB of memory when its shapes are known.
_GRAPH_BYTES, _MOST_TENSORS = 32 << 20, 1 << 16
#: Bytes of one tensor that a graph computes on its examples.
_MOST_BYTES = 1 << 33


def store(program: Program, folder: Path) -> None:
    """Write a captured program into a folder as plain data.

    Raises:
        Refused: It calls an operator, or holds a weight, that plain data does not hold; or there is no room for it.
    """
    try:
        found = describe(program.graph_module)
    except (Malformed, operators.NotListed) as error:
        raise Refused(
            f"The model cannot be taken over without trust: {_reason(error)}.",
            hint="Add --trust if you trust this file.",
        ) from error
    paths = {path: graph.attribute(program.graph_module, path) for path in dict.fromkeys(found.weights.values())}
    kept = {id(tensor): path for path, tensor in reversed(paths.items())}
    tensors = {path: tensor.detach().contiguous() for path, tensor in paths.items() if kept[id(tensor)] == path}
    examples = {f"input:{place}": tensor.contiguous().clone() for place, tensor in enumerate(program.inputs)}
    in_tree, out_tree = write_tree(program.in_spec), write_tree(program.out_spec)
    content = {
        **asdict(found),
        "tied": {path: kept[id(tensor)] for path, tensor in paths.items()},
        "dynamic": [{str(dim): name for dim, name in dims.items()} for dims in program.dynamic],
        "free": {name: asdict(size) for name, size in program.free.items()},
        "in_tree": in_tree,
        "out_tree": out_tree,
        "notes": program.notes,
        "guessed": program.guessed,
    }
    with leaving("the model"):
        (folder / _GRAPH_FILE).write_text(json.dumps(content), encoding="utf-8")
        save_file({**{path: tensor.clone() for path, tensor in tensors.items()}, **examples}, folder / _TENSORS_FILE)


@contextlib.contextmanager
def leaving(what: str) -> Iterator[None]:
    """Tell a folder that does not take what one process leaves there for another.

    Raises:
        Refused: It does not.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Refused(
            f"The temporary folder has no room for {what}: {first_line(error).rstrip('.')}.",
            hint="Free space there, or choose another with TMPDIR.",
        ) from error


def restore(folder: Path) -> Program:
    """Read what `store` wrote, trusting none of it.

    Raises:
        Refused: It is no description.
    """
    try:
        with left_in(folder, _GRAPH_FILE, most_bytes=_GRAPH_BYTES) as file:
            content = json.load(file)
        return _restored(content, load_left(folder, _TENSORS_FILE))
    except (Malformed, operators.NotListed) as error:
        raise Refused(f"The model cannot be taken over without trust: {_reason(error)}.") from error
    except (OptimizeError, MemoryError):
        raise
    except Exception as error:  # the readers of torch and safetensors, and every operator's own rule of shapes
        raise Refused(f"The captured model cannot be read: {type(error).__name__}.") from error


def load_left(folder: Path, name: str, *, most_bytes: int | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors that a child left in its folder.

    Raises:
        Refused: They are none, or more bytes than are read.
    """
    left_in(folder, name, most_bytes=most_bytes).close()
    try:
        return load_file(folder / name)
    except (SafetensorError, ValueError, TypeError, OSError) as error:
        raise Refused("The process that opened the file left tensors that cannot be read.") from error


def _refuse_large(program: Program, runs: Sequence[misfits.Sizes]) -> None:
    """Refuse a program that computes more at once than a machine holds, or as much as its data says.

    What grows with the batch is asked for in batches that fit (``costs.fitting_batch``); what grows faster is not.

    Raises:
        Malformed: It does.
    """
    with torch.device("meta"):  # sizes alone: a large batch of large samples is not made
        samples = [_hollow(program).sample(batch) for batch in (1, UNASKED_BATCH)] if program.batch else []
    growing = [dict(_sizes(program, sample)) for sample in samples]
    known = {symbol for run in runs for symbol in run}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        new = {symbol for size in value.shape for symbol in _symbols(size)} - known
        if any(_symbols(source.meta.get("val")) - known for source in node.all_input_nodes):
            raise Malformed(f"'{node.name}' is as large as its data says")
        known |= new  # what is found in a tensor is no more than it held
        counted = [size for size in value.shape if not _symbols(size) & new]
        for run in runs:  # what has no values because of one size is walked through by the others
            count = math.prod(max(misfits.largest(size, [run]), 1) for size in counted)
            if count * value.itemsize > _MOST_BYTES:
                raise Malformed(f"'{node.name}' has {count:g} values")
        grown = [math.prod(max(misfits.largest(size, [run]), 1) for size in counted) for run in growing]
        if growing and grown[1] * value.itemsize > _MOST_BYTES and grown[1] > UNASKED_BATCH * grown[0]:
            raise Malformed(f"'{node.name}' grows faster than the batch")


def _symbols(size: Any) -> set[Any]:
    """Return what a size is computed from."""
    return set(misfits.expression(size).free_symbols) if isinstance(size, torch.SymInt | torch.SymFloat) else set()


def _refuse_calls(runs: Sequence[misfits.Sizes]) -> Callable[[fx.Node], None]:
    """Return what looks at each call before its shapes are computed, which some kernels end the process over.

    Raises:
        Malformed: When called: it would look or write beyond its arguments, there are more tensors than any network
            has, each of which takes memory of its own, or its sizes are longer than those of any.
    """
    made, terms = 0.0, Terms()

    def check(node: fx.Node) -> None:
        nonlocal made
        terms.refuse_many(node)
        made += misfits.count_made(node, runs)
        if made > _MOST_TENSORS:
            raise Malformed(f"'{node.name}' ({node.target}) makes more tensors, or dimensions, than any network has")
        if reason := misfits.find_misfit(node):
            raise Malformed(f"'{node.name}' ({node.target}) cannot be: {reason}")

    return check


def _runs(program: Program) -> list[misfits.Sizes]:
    """Return what free sizes are in the runs that compare a program with itself; others are the user's to ask for."""
    batch, hollow = program.batch or 1, _hollow(program)
    with torch.device("meta"):
        others = map(hollow.resized, program.other_sizes())
        given = (program.inputs, hollow.sample(1), hollow.sample(batch + 1), *others)
    return [dict(_sizes(program, inputs)) for inputs in given]


def _hollow(program: Program) -> Program:
    """Return a program whose inputs have sizes and no values."""
    return replace(program, inputs=tuple(tensor.to("meta") for tensor in program.inputs))


def _sizes(program: Program, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[Any, sympy.Integer]]:
    given = dict(zip(program.placeholders, inputs, strict=True))
    for node, dim, _ in program.free_places():
        yield misfits.expression(node.meta["val"].shape[dim]), sympy.Integer(given[node].shape[dim])


def _restored(content: Mapping[str, Any], held: Mapping[str, torch.Tensor]) -> Program:
    if len(content["calls"]) > _MOST_TENSORS:
        raise Malformed(f"it has {len(content['calls'])} calls")
    calls = [OperatorCall(**entry) for entry in content["calls"]]
    found = Description(content["inputs"], content["weights"], calls, content["outputs"])
    owned = {
        path: torch.nn.Parameter(tensor, requires_grad=False) if tensor.is_floating_point() else tensor
        for path, tensor in held.items()
        if not path.startswith("input:")
    }
    tensors = {path: owned[kept] for path, kept in content["tied"].items()}
    inputs = tuple(held[f"input:{place}"] for place in range(len(found.inputs)))
    dynamic = tuple({int(dim): checked(NAME, name) for dim, name in dims.items()} for dims in content["dynamic"])
    if any(list(dims.values()).count(BATCH) > 1 for dims in dynamic):
        raise Malformed("it has an input of several batches")
    module = build(found, tensors, functional=True)
    in_spec, out_spec = (read_tree(content[key]) for key in ("in_tree", "out_tree"))
    notes, guessed = [str(note) for note in content["notes"]], str(content["guessed"])
    program = Program(module, inputs, dynamic, in_spec, out_spec, notes=notes, guessed=guessed)
    program.free = _read_free(content["free"], program.example_sizes())
    program.give_shapes()
    runs = _runs(program)
    program.refresh(_refuse_calls(runs))
    if not all(isinstance(symbol, sympy.Symbol) for symbol in runs[0]) or dict(_sizes(program, inputs)) != runs[0]:
        raise Malformed("a size that it calls free is not")
    try:
        if keep_within(module):
            program.refresh()
    except ValueError as error:
        raise Malformed(str(error)) from error
    _refuse_large(program, runs)
    with torch.inference_mode():  # what its kernels refuse is refused here
        program.run(program.sample(program.batch + 1) if program.batch else program.inputs)
    return program


def _read_free(content: Mapping[str, Any], examples: Mapping[str, int]) -> dict[str, FreeSize]:
    """Return the sizes of free dimensions that a description tells.

    Raises:
        Malformed: They are none, others than the free ones, or larger than inputs may be.
    """
    found = {}
    for name, size in examples.items():
        least, most, others = (content[name][key] for key in ("least", "most", "others"))
        numbers = (least, *others, *([] if most is None else [most]))
        fit = all(type(number) is int and 1 <= number <= bounds.SIZE.most for number in numbers)
        if not fit or len(others) > 2 or any(number > 3 * size for number in others):
            raise Malformed(f"'{name}' has no such sizes")
        found[name] = FreeSize(least, most, tuple(others))
    return found


def _reason(error: Exception) -> str:
    said = first_line(error)  # fx adds the call that it was raised in
    return f"operator {said} is not listed" if isinstance(error, operators.NotListed) else said


#: Terms of one value's sizes multiplied together, of all that one call takes, and of all calls. A network with free
#: height and width has 16, 256 and some thousands.
_MOST_TERMS, _MOST_TOGETHER, _MOST_IN_ALL = 1 << 12, 1 << 16, 1 << 20
#: Calls that put tensors beside one another, so that their terms add up.
_BESIDE = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack")
_POWERS = (operator.pow, math.pow)
_WORD = 64


class Terms:
    """Counts the terms of a graph's calls, in the order in which they are computed.

    A graph may compute a size from sizes, and every shape is compared with others: torch and `misfits` write sums of
    products for that, of which a power of a sum has more than memory holds. They are counted on the expression as it
    stands: those of a sum added, those of a product multiplied, and whole numbers by the words they take.
    """

    def __init__(self) -> None:
        self._in_all = 0.0

    def refuse_many(self, node: fx.Node) -> None:
        """Count those of a call, the shapes of what it takes being known.

        Raises:
            Malformed: They are more than any network has.
        """
        found = [_of_value(value.meta.get("val")) for value in node.all_input_nodes]
        self._in_all += sum(found)
        together = sum(found) if graph.op_name(node) in _BESIDE else math.prod(found) ** _exponent(node)
        if max(found, default=0) > _MOST_TERMS or together > _MOST_TOGETHER or self._in_all > _MOST_IN_ALL:
            raise Malformed(f"'{node.name}' computes with sizes of more terms than any network has")


def _exponent(node: fx.Node) -> int:
    """Return how often a function of sizes multiplies what it is given with itself; `description` bounds that."""
    exponent: Any = node.args[1] if node.target in _POWERS else 1
    return max(1, math.ceil(abs(exponent)))


def _of_value(value: Any) -> int:
    """Return the terms of a size, or of all sizes of a tensor multiplied."""
    if isinstance(value, list | tuple):
        return max(map(_of_value, value), default=1)
    return math.prod(map(_of_size, value.shape)) if isinstance(value, torch.Tensor) else _of_size(value)


def _of_size(size: Any) -> int:
    return _count(size.node.expr) if isinstance(size, torch.SymInt | torch.SymFloat) else 1


@functools.lru_cache(maxsize=1 << 12)
def _count(expression: Any) -> int:
    """Return how many terms an expression has when it is multiplied out, or more."""
    if not expression.args:
        return 1 + int(expression).bit_length() // _WORD if expression.is_Integer else 1
    parts = list(map(_count, expression.args))
    if expression.is_Pow:
        exponent = expression.args[1]
        return parts[0] ** min(math.ceil(abs(exponent)), _WORD) if exponent.is_number else _MOST_IN_ALL
    return math.prod(parts) if expression.is_Mul else sum(parts)
