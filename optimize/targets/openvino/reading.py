"""The one door to an OpenVINO file that the user names: checked before OpenVINO sees it.

Constants lie in the ``.bin`` beside the description and nowhere else, loops end, and no library is ever loaded: a layer
of an extension ends in OpenVINO's own error.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optimize import sandbox
from optimize.errors import Refused
from optimize.regular import find, require_beside, shown
from optimize.targets.base import HINT, MOST_DIMENSIONS, MOST_ELEMENTS, MOST_STEPS, NUMBERS, TensorSpec
from optimize.targets.openvino.description import Body, IrLayer, read_description

#: Bits of an element; other types (text, and those packed in their own ways) are checked by OpenVINO alone.
_BITS = {
    "u1": 1, "bin": 1, "u2": 2, "i4": 4, "u4": 4, "nf4": 4, "f4e2m1": 4, "boolean": 8, "i8": 8, "u8": 8, "f8e4m3": 8,
    "f8e5m2": 8, "f8e8m0": 8, "i16": 16, "u16": 16, "f16": 16, "bf16": 16, "i32": 32, "u32": 32, "f32": 32, "i64": 64,
    "u64": 64, "f64": 64,
}  # fmt: skip
_NUMPY = {name: np.dtype(name) for name in ("i8", "u8")} | {
    f"{kind}{bits}": np.dtype(f"<{kind}{bits // 8}") for kind in "iuf" for bits in (16, 32, 64)
}
#: Numbers that say how large something is: one an axis, at most, in one of the first few inputs.
_MOST_SIZES, _READ = 64, 3
_SAVE = "Write both files again with openvino.save_model."
#: Layers that keep the numbers of their first input.
_CARRYING = frozenset({"convert", "squeeze", "unsqueeze", "reshape"})
#: Layers that sum over what their factors share: where that is nothing, OpenVINO leaves their output as memory was.
_PRODUCTS = frozenset({"matmul", "einsum", "convolution", "scaleddotproductattention"})


def check_ir(path: Path, *, trust: bool = False) -> Body:
    """Check a description and the weights beside it; return its graph.

    Args:
        path: The ``.xml``.
        trust: Take whatever time and memory the file asks for; everything else is checked all the same.

    Raises:
        Refused: A file is no regular one, the ``.bin`` is a link out of the folder, the description is no XML of
            OpenVINO, a constant is not in the ``.bin`` or has another size than its shape says, a loop has no bound,
            a value of a stated size is too large, or a constant without elements is multiplied.
    """
    net, weights = read_description(path), path.with_suffix(".bin")
    size = None if find(weights) is None else require_beside(weights, path)
    _Check(path, weights, size, trust).body(net, 1)
    return net


def read_model(path: Path) -> Any:
    """Return OpenVINO's model of a description and the ``.bin`` beside it.

    Raises:
        TargetUnavailable: OpenVINO is not installed.
        Refused: OpenVINO cannot read it.
    """
    from optimize.targets.openvino.runner import core, refusing

    weights = path.with_suffix(".bin")
    reader = core()
    with refusing(f"open '{path.name}'"):
        return reader.read_model(path, *[weights] if weights.is_file() else [])


#: What a file takes and what it gives.
Ends = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]


def ends_of(path: Path, *, trust: bool = False) -> Ends:
    """Return what a checked description takes and gives, read in a confined process: OpenVINO's reader crashes.

    Args:
        path: The ``.xml``.
        trust: Let the process do everything.

    Raises:
        TargetUnavailable: OpenVINO is not installed.
        Refused: OpenVINO cannot read it, crashed over it, or was made to say what is no answer.
    """
    answer = sandbox.call(
        "optimize.targets.openvino.reading:read_ends",
        {"path": str(path.absolute())},
        about=f"'{shown(path)}'",
        limits=sandbox.ChildLimits.of([path, path.with_suffix(".bin")]),
        confined=not trust,
    )
    try:
        takes, gives = (tuple(TensorSpec.told(*entry) for entry in end) for end in answer.value)
    except (TypeError, ValueError) as error:
        raise Refused(f"The process that opened '{shown(path)}' gave no answer.", hint=HINT) from error
    return takes, gives


def read_ends(folder: Path, tell: Any, path: str) -> list[list[tuple[Any, ...]]]:
    """Return what `ends_here` does as plain data."""
    return [[(spec.name, spec.shape, spec.dtype) for spec in end] for end in ends_here(Path(path))]


def ends_here(path: Path) -> Ends:
    """Return what a description takes and gives, read in this process; a free size is ``?``.

    What it gives is empty where one of it has no name, no known number of dimensions or no type of arrays.

    Raises:
        TargetUnavailable: OpenVINO is not installed.
        Refused: OpenVINO cannot read it, or an input of it has no name, more dimensions than arrays have, or no type
            of theirs.
    """
    from optimize.targets.openvino.runner import refusing

    model = read_model(path)
    with refusing(f"tell what '{path.name}' takes"):
        specs = tuple(_spec(port) for port in model.inputs)
    odd = next((spec.name for spec in specs if spec.dtype not in NUMBERS or len(spec.shape) > MOST_DIMENSIONS), None)
    if odd is not None:
        raise Refused(f"'{shown(path)}' takes '{shown(odd)}'; only tensors of numbers can be given here.")
    gives: tuple[TensorSpec, ...] = ()
    with contextlib.suppress(Exception):  # OpenVINO's, which have no base class of their own
        gives = tuple(_spec(port) for port in model.outputs)
    return specs, gives if all(spec.dtype in NUMBERS for spec in gives) else ()


def _spec(port: Any) -> TensorSpec:
    sizes = [dim.get_length() if dim.is_static else "?" for dim in port.get_partial_shape()]
    kind = port.get_element_type()
    dtype = "bfloat16" if kind.get_type_name() == "bf16" else np.dtype(kind.to_dtype()).name
    return TensorSpec(port.get_any_name(), tuple(sizes), dtype)


class _Check:
    """Goes through every layer of every body."""

    def __init__(self, path: Path, weights: Path, size: int | None, trust: bool) -> None:
        self._path, self._weights, self._size, self._trust = path, weights, size, trust
        self._steps = 0
        self._origins: dict[tuple[bool, int], IrLayer | None] = {}

    def body(self, body: Body, times: int) -> None:
        """Check a graph that is executed so many times."""
        for layer in body.layers.values():
            self._steps += times
            if layer.kind == "const":
                self._check_constant(layer)
            elif not self._trust:
                self._check_growth(body, layer)
                self._check_factors(body, layer)
            inside = times * self._trips(body, layer)
            for part in layer.bodies:
                self.body(part, inside)
        if self._steps > MOST_STEPS and not self._trust:
            raise self._too_much(f"more than {MOST_STEPS} layers are executed, those of loops each time")

    def _check_constant(self, layer: IrLayer) -> None:
        offset, size = (self._number(layer, key) for key in ("offset", "size"))
        if self._size is None:
            raise self._refusal(layer, f"it is stored in '{shown(self._weights.name)}', which is not beside it")
        if offset + size > self._size:
            raise self._refusal(
                layer, f"it ends at byte {offset + size} of '{self._weights.name}', which has {self._size}"
            )
        kind, count = layer.data.get("element_type", ""), math.prod(self._shape(layer))
        if kind != kind.lower():  # OpenVINO takes I64 for i64
            raise self._refusal(layer, f"'{shown(kind)}' is no type that OpenVINO writes")
        needed = -(-count * _BITS[kind] // 8) if kind in _BITS else size
        if size != needed and (count or size != 1):  # of no elements OpenVINO stores a byte
            raise self._refusal(layer, f"{size} bytes are stored, its shape needs {needed}")

    def _number(self, layer: IrLayer, key: str) -> int:
        text = layer.data.get(key, "")
        if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
            raise self._refusal(layer, f"'{shown(text)}' is no {key}")
        return int(text)

    def _shape(self, layer: IrLayer) -> list[int]:
        shape = layer.data.get("shape", "")
        if not re.fullmatch(r"([0-9]{1,19}(, ?[0-9]{1,19}){0,63})?", shape, re.ASCII):
            raise self._refusal(layer, f"'{shown(shape)}' is no shape")
        return [int(word) for word in shape.split(",") if word]

    def _trips(self, body: Body, layer: IrLayer) -> int:
        """Return how often what is inside a layer is executed; once where the data says it."""
        if layer.kind != "loop" or self._trust:
            return 1
        found = self._numbers(body, layer, 0)
        if found is None and self._is_computed(body, layer):
            raise self._too_much(f"the loop '{shown(layer.name)}' computes its rounds from constants")
        trips = 1 if found is None or len(found) != 1 else int(found[0]) if math.isfinite(found[0]) else -1
        if not 0 <= trips <= MOST_STEPS:
            rounds = f"may run {trips} rounds; {MOST_STEPS} are allowed" if trips > 0 else "has no last round"
            raise self._too_much(f"the loop '{shown(layer.name)}' {rounds}")
        return trips

    def _is_computed(self, body: Body, layer: IrLayer) -> bool:
        """Say whether a loop's rounds are made of constants alone, which OpenVINO folds to any number."""
        waiting, seen = [body.source(layer, 0)], set[int]()
        while waiting:
            part = waiting.pop()
            if part is None or part.kind == "parameter":
                return False
            if id(part) not in seen:
                seen.add(id(part))
                waiting += [body.source(part, place) for place in range(len(part.ports))]
        return True

    def _check_growth(self, body: Body, layer: IrLayer) -> None:
        """Refuse a value that is as large as constants say, where they say too much."""
        rule = _GROWING.get(layer.kind)
        numbers = [self._numbers(body, layer, place) for place in range(min(len(layer.ports), _READ))] if rule else []
        try:
            elements = rule(numbers) if rule else 0
        except (TypeError, IndexError, ValueError, OverflowError, ZeroDivisionError):
            return  # what it needs is computed from data, or makes no sense: OpenVINO's to say
        if elements > MOST_ELEMENTS:
            raise self._too_much(
                f"the layer '{shown(layer.name)}' makes {elements} elements; {MOST_ELEMENTS} are allowed"
            )

    def _check_factors(self, body: Body, layer: IrLayer) -> None:
        """Refuse a product of a constant with nothing to sum over, whatever became of the constant before."""
        places = range(len(layer.ports)) if layer.kind in _PRODUCTS else ()
        factors = (self._origin(body, body.source(layer, place), made=True) for place in places)
        if any(factor is not None and factor.kind == "const" and 0 in self._shape(factor) for factor in factors):
            raise Refused(
                f"'{shown(self._path)}' multiplies nothing in '{shown(layer.name)}': its answer is what lay in memory.",
                hint=HINT,
            )

    def _numbers(self, body: Body, layer: IrLayer, place: int) -> list[Any] | None:
        """Return the few numbers of a constant that feeds an input; None where there is none."""
        source = self._origin(body, body.source(layer, place))
        if source is None or source.kind != "const" or source.data.get("element_type") not in _NUMPY:
            return None
        self._check_constant(source)
        dtype, count = _NUMPY[source.data["element_type"]], math.prod(self._shape(source))
        if count > _MOST_SIZES:
            return None
        return np.fromfile(self._weights, dtype, count, offset=self._number(source, "offset")).tolist()

    def _made_of(self, body: Body, layer: IrLayer) -> IrLayer | None:
        """Return what a layer has besides constants, or a constant, best an empty one; itself where it has more."""
        sources = (body.source(layer, place) for place in range(len(layer.ports)))
        found = [source for given in sources if (source := self._origin(body, given))]
        data = [source for source in found if source.kind != "const"]
        data = data or sorted(found, key=lambda constant: 0 not in self._shape(constant))[:1]
        return data[0] if len(data) == 1 else layer

    def _origin(self, body: Body, layer: IrLayer | None, *, made: bool = False) -> IrLayer | None:
        """Return the layer whose numbers a layer carries on, or is made of; a chain of them is walked once."""
        walked = []
        while layer is not None and (key := (made, id(layer))) not in self._origins:
            carried = body.source(layer, 0) if layer.kind in _CARRYING else layer
            back = self._made_of(body, layer) if made else carried
            self._origins[key] = layer if back is layer else None  # a ring begins nowhere
            walked.append(key)
            layer = back
        found = None if layer is None else self._origins[made, id(layer)]
        self._origins.update(dict.fromkeys(walked, found))
        return found

    def _refusal(self, layer: IrLayer, reason: str) -> Refused:
        return Refused(
            f"'{shown(self._path)}' is refused for its constant '{shown(layer.name)}': {reason}.", hint=_SAVE
        )

    def _too_much(self, reason: str) -> Refused:
        return Refused(f"'{shown(self._path)}' asks for too much: {reason}.", hint=HINT)


def _product(place: int) -> Callable[[Sequence[Any]], int]:
    return lambda numbers: math.prod(map(int, numbers[place]))


def _range(numbers: Sequence[Any]) -> int:
    (start,), (stop,), (step,) = numbers
    return max(0, math.ceil((stop - start) / step))


#: How many elements a layer makes at least, from the numbers of its inputs.
_GROWING: dict[str, Callable[[Sequence[Any]], int]] = {
    "broadcast": _product(1),
    "tile": _product(1),
    "randomuniform": _product(0),
    "range": _range,
    "onehot": lambda numbers: int(numbers[1][0]),
    "eye": lambda numbers: math.prod(int(entry[0]) for entry in numbers[:2]),
    "pad": lambda numbers: math.prod(1 + max(int(a) + int(b), 0) for a, b in zip(*numbers[1:3], strict=True)),
    "interpolate": _product(1),
}
