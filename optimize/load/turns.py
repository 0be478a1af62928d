"""How much a TorchScript file executes: a bound on its loops and calls, before anything of it is run.

The compiled functions are read from the module's methods downwards, each value with its magnitude (`magnitudes`). Sizes
of inputs count as `bounds.LOOPED_SIZE`, attributes as what the file gives them. Turns multiply over nested loops and
along calls, and a function is read once for each magnitudes that it is called with: a file that calls one twice on each
of sixty levels is counted, not followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from optimize import bounds
from optimize.load.magnitudes import (
    UNBOUNDED,
    Magnitude,
    join,
    magnitude,
    nodes,
    of_operator,
    short_name,
    size_told,
    type_name,
)
from optimize.load.operators import words

#: What makes a list or a dictionary longer, or puts something into it.
_GROWING = words("append insert extend add_ _set_item setdefault update")
#: What leaves it as long as it is, or makes it shorter; after anything else that changes it, its length is not known.
_SHRINKING = words("pop remove clear reverse sort")
_MADE = ("prim::ListConstruct", "prim::DictConstruct")
#: Passes over a function until what still grows is taken to be without bound; and nodes that are looked at in all.
_PASSES, _MOST_READ, _MOST_MODULES = 8, 1 << 20, 100_000
#: Of an input; and what is given to find one size of a tensor.
_MOST_DIMENSIONS, _OF_ONE = 64, 2
#: Methods that are called without being named.
_UNNAMED = {"prim::Enter": "__enter__", "prim::Exit": "__exit__"}
_CALLS = ("prim::CallMethod", "prim::CallFunction", *_UNNAMED)
#: What gives a tensor another shape where it is; so do all that write to one and are not called ``..._``.
_RESHAPING = words("resize_ resize_as_ resize_as_sparse_ set_ unsqueeze_ as_strided_")


class Endless(Exception):
    """A function may run for too long; the text says why, ``function`` is its name."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(reason)
        self.function = function


@dataclass(frozen=True)
class Called:
    """What one call of a function comes to: operators that are executed, and the magnitude of what it returns."""

    steps: float
    returned: tuple[Magnitude, ...]


def check(functions: Iterable[Any], module: Any) -> None:
    """Bound what the methods of a module execute.

    Args:
        functions: All that were compiled.
        module: The module, of ``torch._C``.

    Raises:
        Endless: A method may execute more than `bounds.MOST_STEPS` operators.
    """
    known = {function.qualified_name: function for function in functions}
    calls = _Calls(known, _Attributes(module, known.values()))
    own = module._type().qualified_name()
    for name, function in known.items():
        if name.rpartition(".")[0] == own:
            calls.of(name, tuple(map(_given, function.schema.arguments)))


def _given(argument: Any) -> Magnitude:
    """Return the magnitude of what a user gives for an argument, or of what it is by itself."""
    if argument.type.annotation_str == "bool":
        return Magnitude(1.0)
    if argument.has_default_value() and "Tensor" not in argument.type.annotation_str:
        return magnitude(argument.default_value)
    many = 0 if argument.type.annotation_str == "Tensor" else bounds.LOOPED_SIZE
    return Magnitude(bounds.LOOPED_SIZE, many, _MOST_DIMENSIONS)


def _held(read: Callable[[], Any]) -> Magnitude:
    """Return the magnitude of a value of the file; what Python has no class for (an enumeration) has no bound."""
    try:
        return magnitude(read())
    except RuntimeError:
        return UNBOUNDED


class _Attributes:
    """Magnitudes of the attributes of modules, as the file gives them: infinite where a function sets them."""

    def __init__(self, module: Any, functions: Iterable[Any]) -> None:
        self._instances: dict[str, list[Any]] = {}
        self._known: dict[tuple[str, str], Magnitude] = {}
        waiting = [module]
        for count, here in enumerate(waiting):
            if count > _MOST_MODULES:
                raise Endless("forward", f"belongs to more than {_MOST_MODULES} modules")
            self._instances.setdefault(here._type().qualified_name(), []).append(here)
            waiting += [child for _, child in torch._C.ModuleDict(here).items()]  # what is appended is walked too
        for function in functions:
            for node in nodes(function.graph):
                if node.kind() == "prim::SetAttr" and function.name != "__setstate__":
                    self._known[type_name(next(node.inputs())), node.s("name")] = UNBOUNDED
                if node.kind() in _CALLS and _callee(node)[0].endswith("__setstate__"):
                    raise Endless(function.name, "calls '__setstate__'")

    def get(self, owner: str, name: str) -> Magnitude:
        """Return what an attribute does not exceed in any module of a class."""
        if (owner, name) not in self._known:
            held = self._instances.get(owner)
            self._known[owner, name] = join(_held(partial(each.getattr, name)) for each in held) if held else UNBOUNDED
        return self._known[owner, name]


class _Calls:
    """Functions by name, each read once for the magnitudes it is called with."""

    def __init__(self, functions: Mapping[str, Any], attributes: _Attributes) -> None:
        self._functions, self.attributes = functions, attributes
        self._done: dict[tuple[str, tuple[Magnitude, ...]], Called | None] = {}
        self._read = 0
        self._carried = {name: _carried(function.graph) for name, function in functions.items()}
        #: Types of lists that somebody changes who did not make them.
        self.loose: set[str] = set()
        #: Whether a tensor may be given another shape where it is.
        self.reshapes = False
        for name, function in functions.items():
            for node in nodes(function.graph):
                self._look(node, self._carried[name])

    def _look(self, node: Any, carried: Mapping[int, Sequence[Any]]) -> None:
        """Take note of what is changed where it is."""
        schema, short = node.schema(), short_name(node)
        if "!)" not in schema or not node.inputsSize():
            return
        receiver = next(node.inputs())
        if "Tensor(" in schema and (short in _RESHAPING or not short.endswith("_")):
            self.reshapes = True
        counted = short in _SHRINKING or (short in _GROWING and _made(receiver, carried, set()) is not None)
        if type_name(receiver) != "Tensor" and not counted:
            self.loose.add(type_name(receiver))

    def knows(self, name: str) -> bool:
        """Say whether a function was compiled."""
        return name in self._functions

    def of(self, name: str, given: tuple[Magnitude, ...]) -> Called:
        """Return what a call with arguments of some magnitudes comes to."""
        if (name, given) in self._done:
            done = self._done[name, given]
            if done is None:
                raise Endless(self._functions[name].name, "calls itself")
            return done
        self._done[name, given] = None
        done = _Body(self, self._functions[name], self._carried[name]).run(given)
        self._done[name, given] = done
        return done

    def count(self, function: str) -> None:
        """Count one node that is looked at."""
        self._read += 1
        if self._read > _MOST_READ:
            raise Endless(function, "calls others in more ways than can be counted")


class _Body:
    """One function with the magnitudes of its arguments."""

    def __init__(self, calls: _Calls, function: Any, carried: Mapping[int, Sequence[Any]]) -> None:
        self._calls, self._graph, self._name, self._carried = calls, function.graph, function.name, carried
        self._found: dict[int, Magnitude] = {}
        self._grown: dict[tuple[int, int], tuple[float, Magnitude]] = {}
        self._loops: list[tuple[int, float]] = []
        self._within: dict[int, int] = {}
        self._pass, self._place, self._changed = 0, 0, True

    def run(self, given: Sequence[Magnitude]) -> Called:
        """Read it until nothing grows any more."""
        steps = 0.0
        while self._changed:
            self._changed = False
            self._pass, self._place = self._pass + 1, 0
            for value, bound in zip(self._graph.inputs(), given, strict=True):
                self._raise(value, bound)
            steps = self._steps(self._graph)
        return Called(steps, tuple(self._of(value) for value in self._graph.outputs()))

    def _of(self, value: Any) -> Magnitude:
        return self._found.get(value.unique(), Magnitude())

    def _raise(self, value: Any, bound: Magnitude) -> None:
        """Take note that a value may be as large; in later passes, that what still grows has no bound."""
        kind, before = type_name(value), self._of(value)
        if kind in self._calls.loose or (self._calls.reshapes and "Tensor" in kind):
            bound = UNBOUNDED
        after = Magnitude(*map(float, join([before, bound])))  # floats end at infinity, whole numbers nowhere
        if after != before or value.unique() not in self._found:
            if self._pass > _PASSES:
                after = Magnitude(*(new if new == old else math.inf for new, old in zip(after, before, strict=True)))
            self._found[value.unique()], self._changed = after, True

    def _steps(self, block: Any) -> float:
        """Return how many operators a block executes."""
        total = 0.0
        for node in block.nodes():
            self._calls.count(self._name)
            self._place += 1
            total += 1 + self._read(node)
            if total > bounds.MOST_STEPS:
                raise Endless(self._name, f"executes more than {bounds.MOST_STEPS} operators")
        return total

    def _read(self, node: Any) -> float:
        """Bound what a node gives; return how many operators are executed in it."""
        kind = node.kind()
        if kind == "prim::Loop":
            return self._loop(node)
        if kind == "prim::If":
            return self._branch(node)
        if kind in _CALLS:
            return self._call(node)
        self._grow(node)
        for value, bound in zip(node.outputs(), self._bounds(node), strict=True):
            self._raise(value, bound)
        return 0.0

    def _loop(self, node: Any) -> float:
        count, _, *initial = node.inputs()
        turns = self._of(count).largest
        if turns >= 1 << 62:
            raise Endless(self._name, "has a loop that ends when its data says so, or sizes that have no bound")
        body = next(node.blocks())
        index, *inside = body.inputs()
        self._raise(index, Magnitude(turns))
        for outer, inner in zip(initial, inside, strict=True):
            self._raise(inner, self._of(outer))
        self._loops.append((index.unique(), max(turns, 1)))
        each = 1 + self._steps(body)
        self._loops.pop()
        _, *again = body.outputs()
        for inner, last, outer, left in zip(inside, again, initial, node.outputs(), strict=True):
            self._raise(inner, self._of(last))
            self._raise(left, join([self._of(last), self._of(outer)]))
        if turns * each > bounds.MOST_STEPS:
            raise Endless(self._name, f"has loops of {turns:.0f} turns, of {each:.0f} operators each")
        return turns * each

    def _branch(self, node: Any) -> float:
        branches = list(node.blocks())
        if self._of(next(node.inputs())).largest == 0:  # it is False whatever happens, as `training` is in most files
            branches = branches[1:]
        steps = max(self._steps(branch) for branch in branches)
        for branch in branches:
            for value, left in zip(branch.outputs(), node.outputs(), strict=True):
                self._raise(left, self._of(value))
        return steps

    def _call(self, node: Any) -> float:
        name, given = _callee(node)
        if self._calls.knows(name):
            # ``__exit__`` is given the error that there is none of, three arguments that the call leaves out.
            lacking = 3 if node.kind() == "prim::Exit" else 0
            called = self._calls.of(name, (*map(self._of, given), *(Magnitude(),) * lacking))
        elif "__torch__.torch.classes." in name or node.kind() in _UNNAMED:
            called = Called(1.0, (UNBOUNDED,) * node.outputsSize())
        else:
            raise Endless(self._name, f"calls '{name}', which is chosen while it runs")
        for value, bound in zip(node.outputs(), called.returned, strict=False):
            self._raise(value, bound)
        return called.steps

    def _grow(self, node: Any) -> None:
        """Take note of what is added to lists that this function made."""
        if short_name(node) not in _GROWING or not node.inputsSize():
            return
        receiver, *added = node.inputs()
        for made in _made(receiver, self._carried, set()) or ():
            outside = self._within.get(made, 0) if made == receiver.unique() else 0
            turns = math.prod(count for _, count in self._loops[outside:])
            held = join(map(self._of, added))
            many = held.length if short_name(node) in ("extend", "add_", "update") else 1.0
            self._grown[made, self._place] = (turns * many, held)

    def _bounds(self, node: Any) -> Iterable[Magnitude]:
        outputs = list(node.outputs())
        if node.kind() == "prim::GetAttr":
            return [self._calls.attributes.get(type_name(next(node.inputs())), node.s("name"))]
        if node.kind() == "prim::Constant":
            return [_held(value.toIValue) for value in outputs]
        bound = self._of_made(node) if _makes(node) else self._of_operator(node)
        return [_of_type(type_name(value), bound) for value in outputs]

    def _of_made(self, node: Any) -> Magnitude:
        """Return the magnitude of a list that is made here, with what is added to it anywhere in the function."""
        made, given = node.output().unique(), list(map(self._of, node.inputs()))
        self._within[made] = len(self._loops)
        grown = [each for (site, _), each in self._grown.items() if site == made]
        length = len(given) + sum(count for count, _ in grown)
        return join([*given, *(held for _, held in grown), Magnitude(0, length)])

    def _of_operator(self, node: Any) -> Magnitude:
        given = [(value, self._of(value)) for value in node.inputs()]
        told = None
        if short_name(node) == "size" and len(given) == _OF_ONE and not self._calls.reshapes:
            told = size_told(given[0][0], given[1][0])
        return of_operator(node, given) if told is None else self._of(told)


def _of_type(kind: str, bound: Magnitude) -> Magnitude:
    """Return what is left of a bound for a value of a type."""
    if kind == "Tensor":
        return bound._replace(length=0.0)
    return Magnitude(1.0) if kind == "bool" else Magnitude(bound.largest) if kind in ("int", "float") else bound


def _carried(block: Any) -> dict[int, tuple[Any, ...]]:
    """Return what each value is one of, by its number, of those that loops and branches hand on."""
    found: dict[int, tuple[Any, ...]] = {}
    for node in nodes(block):
        if node.kind() == "prim::Loop":
            body = next(node.blocks())
            sets = zip(
                list(node.inputs())[2:], list(body.inputs())[1:], list(body.outputs())[1:], node.outputs(), strict=True
            )
            for first, inside, last, left in sets:
                found[inside.unique()] = found[left.unique()] = (first, last)
        elif node.kind() == "prim::If":
            for left, *values in zip(
                node.outputs(), *(list(branch.outputs()) for branch in node.blocks()), strict=True
            ):
                found[left.unique()] = tuple(values)
    return found


def _makes(node: Any) -> bool:
    """Say whether a node makes a list or a dictionary of what it is given one by one."""
    return node.kind() in _MADE or (node.kind() == "aten::dict" and not node.inputsSize())


def _made(value: Any, carried: Mapping[int, Sequence[Any]], seen: set[int]) -> set[int] | None:
    """Return the numbers of the lists that a value is one of; None where another function may have made it."""
    if value.unique() in seen:
        return set()
    seen.add(value.unique())
    if _makes(value.node()):
        return {value.unique()}
    sources = carried.get(value.unique(), ())
    if value.node().kind() == "aten::add_":
        sources = (next(value.node().inputs()),)
    found = [_made(source, carried, seen) for source in sources]
    return set().union(*found) if found and None not in found else None  # type: ignore[arg-type]


def _callee(node: Any) -> tuple[str, list[Any]]:
    """Return the full name of the function that a node calls, and what it is given."""
    first, *given = node.inputs()
    if node.kind() == "prim::CallFunction":
        return type_name(first), given
    method = _UNNAMED.get(node.kind()) or node.s("name")
    return f"{type_name(first)}.{method}", [first, *given]
