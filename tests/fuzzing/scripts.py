"""TorchScript source text: other operators, loops, methods that run while it is loaded, other words."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

import torch

from tests.fuzzing import hostile, zips

_RETURN = re.compile(rb"^( *)return (\w+)", re.MULTILINE)
_CALL = re.compile(rb"torch\.(\w+)\(")
_WORD = re.compile(rb"[A-Za-z_]\w*")
_LITERAL = re.compile(rb"(?<![\w.])\d+(?![\w.])|\"[^\"\n]*\"")
_CLASS = re.compile(rb"^class .*$", re.MULTILINE)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return an archive with one source text of it changed in one or two ways."""

    def change(text: bytes) -> bytes:
        for _ in range(chance.choice((1, 1, 2))):
            text = chance.choice(_CHANGES)(text, chance)
        return text

    return zips.edited(data, chance, lambda name: name.endswith(".py"), change)


@functools.cache
def _schemas() -> tuple[torch._C.FunctionSchema, ...]:
    return tuple(sorted(torch._C._jit_get_all_schemas(), key=lambda schema: (schema.name, schema.overload_name)))


def _written(name: str, chance: random.Random) -> str:
    """Return one argument of a type, as source text."""
    marker = str(hostile.MARKER)
    number = str(chance.choice((0, 1, 2, 3, -1, 100, 10**9)))
    known = {
        "Tensor": "VALUE", "Optional[Tensor]": chance.choice(("VALUE", "None")), "int": number, "SymInt": number,
        "float": "0.5", "bool": chance.choice(("True", "False")), "number": number, "Scalar": number,
        "str": repr(chance.choice((marker, "x", "mean"))).replace("'", '"'), "List[Tensor]": "[VALUE, VALUE]",
        "List[int]": "[0, 1]", "Device": 'torch.device("cpu")', "t": "VALUE", "List[t]": "[VALUE]",
        "AnyListType": "[1]",
    }  # fmt: skip
    return known.get(name, "None" if name.startswith("Optional") else "VALUE")


def _invocation(chance: random.Random) -> str:
    """Return a call of any registered operator with arguments of its types."""
    schema = chance.choice(_schemas())
    library, _, short = schema.name.partition("::")
    given = ", ".join(_written(argument.type.annotation_str, chance) for argument in schema.arguments[:9])
    forms = [f"ops.{library}.{short}({given})"]
    if library in ("aten", "prim"):
        forms.append(f"torch.{short}({given})")
    return chance.choice(forms)


def _swapped(
    text: bytes, pattern: re.Pattern[bytes], chance: random.Random, make: Callable[[re.Match[bytes]], bytes]
) -> bytes:
    """Put something else where a pattern is found, in one place."""
    places = list(pattern.finditer(text))
    if not places:
        return text
    at = chance.choice(places)
    return text[: at.start()] + make(at) + text[at.end() :]


def _before_return(text: bytes, chance: random.Random, *lines: str) -> bytes:
    """Put lines before a return, ``VALUE`` in them standing for what is returned."""

    def put(at: re.Match[bytes]) -> bytes:
        return b"".join(at[1] + line.encode().replace(b"VALUE", at[2]) + b"\n" for line in lines) + at[0]

    return _swapped(text, _RETURN, chance, put)


def _call_more(text: bytes, chance: random.Random) -> bytes:
    call = _invocation(chance)
    return _before_return(text, chance, chance.choice((f"_out = {call}", call)))


def _call_other(text: bytes, chance: random.Random) -> bytes:
    def put(at: re.Match[bytes]) -> bytes:
        library, _, short = chance.choice(_schemas()).name.partition("::")
        return f"ops.{library}.{short}(".encode()

    return _swapped(text, _CALL, chance, put)


def _loop(text: bytes, chance: random.Random) -> bytes:
    count = chance.choice(("2", "10", "9223372036854775807", "10000000000", "int(VALUE)", "torch.size(VALUE, 0)"))
    call = chance.choice(("VALUE", _invocation(chance), "torch.relu(VALUE)"))
    body = ["while True:", f"  _in = {call}"]
    if chance.random() < 0.7:
        body = [f"for _i in range({count}):", f"  _in = {call}"]
    if chance.random() < 0.3:
        body = [body[0], f"  for _j in range({count}):", f"    _in = {call}"]
    return _before_return(text, chance, *body)


def _setstate(text: bytes, chance: random.Random) -> bytes:
    """Give a class methods that run while it is loaded."""
    call = _invocation(chance).replace("VALUE", chance.choice(("state", "torch.zeros([1, 2])")))
    methods = (
        "\n  def __getstate__(self: __torch__.X) -> Tensor:\n    return torch.zeros([1])"
        f"\n  def __setstate__(self: __torch__.X, state: Tensor) -> NoneType:\n    _a = {call}\n    return None\n"
    )
    return _CLASS.sub(lambda found: found[0] + methods.encode().replace(b"X", b"Looped"), text, count=1)


def _word(text: bytes, chance: random.Random) -> bytes:
    """Replace a word by another of the text, or by a hostile one."""

    def put(at: re.Match[bytes]) -> bytes:
        if chance.random() < 0.6:
            return chance.choice(_WORD.findall(text))
        return hostile.text(chance).encode("utf-8", "replace")[:2000]

    return _swapped(text, _WORD, chance, put)


def _literal(text: bytes, chance: random.Random) -> bytes:
    def put(at: re.Match[bytes]) -> bytes:
        other = f'"{hostile.text(chance)[:500]}"' if at[0][:1] == b'"' else str(chance.choice(hostile.NUMBERS))
        return other.encode("utf-8", "replace")

    return _swapped(text, _LITERAL, chance, put)


def _line(text: bytes, chance: random.Random) -> bytes:
    """Drop, double or move a line."""
    lines = text.split(b"\n")
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
    line = lines.pop(at)
    for _ in range(chance.randrange(3)):
        lines.insert(to, line)
    return b"\n".join(lines)


def _nest(text: bytes, chance: random.Random) -> bytes:
    depth = 5000 if chance.random() < 0.02 else chance.choice((50, 200))  # torch's parser dies of the deepest
    form = chance.choice(("(" * depth + "VALUE" + ")" * depth, "[" * depth + "VALUE" + "]" * depth, "-" * depth + "1"))
    return _before_return(text, chance, f"_in = {form}")


_CHANGES = (_call_more, _call_more, _call_other, _call_other, _loop, _setstate, _word, _word, _literal, _line, _nest)
