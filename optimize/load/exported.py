"""``.pt2`` files of torch.export.save: what in one can run code, and how that is checked before anything is loaded.

``torch.export.load`` trusts its file in five ways, each of which runs code of the file's author:

1. pickled members (sample inputs, pickled weights) fall back to the unrestricted unpickler;
2. custom and opaque objects are unpickled;
3. symbolic sizes are texts that sympy evaluates with ``eval``, and guards are texts put into a function with ``exec``;
4. operators are found by walking attributes from ``torch`` or ``operator``, and input trees may import modules by name;
5. names of values become part of generated source code.

So the whole description is held to a narrow language first: pickles that torch's restricted unpickler reads, plain
names, plain arithmetic, operators of torch's own libraries, and trees of tuples, lists and dicts. The check and the
load use the same archive reader on the same open file, so that both see the same bytes.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import pickle
import re
import warnings
from collections.abc import Iterator
from typing import IO, Any

import torch

from optimize.errors import Refused
from optimize.load.pickles import wanted_globals

_HINT = "Add --trust if you trust this file, or export the model again with torch.export.save."
_PLAIN = re.compile(r"[\w.+\-/<> ]*")
_TEXT = re.compile(r"[^'\"\\\r\n]*")
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|quantized|quantized_decomposed|torchao|torchvision)\.(?!from_file|save)\w+\.\w+"
    r"|torch\.ops\.higher_order\.(cond|map_impl|scan|while_loop|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
    r"|math\.(ceil|floor|trunc|sqrt|pow|log2)|torch\.(_sym_sqrt|sym_\w+)"
)
_TREES = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")
_SYMBOLIC = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Mod|PythonMod|Max|Min|Abs|Eq|Ne|Equality|Unequality"
    r"|LessThan|GreaterThan|StrictLessThan|StrictGreaterThan|And|Or|Not|FloorDiv|ModularIndexing|Where"
    r"|CleanDiv|CeilDiv|CeilToInt|FloorToInt|LShift|RShift|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv"
    r"|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity|IsNonOverlappingAndDenseIndicator"
    r"|floor|ceiling|true|false|oo|int_oo"
    r"|[a-z]{1,4}\d+"
)
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop)
_ALLOWED_NODES = (*_ARITHMETIC, ast.cmpop, ast.expr_context, ast.Call, ast.keyword, ast.Name, ast.Subscript)
_NEVER_READ = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom")
_PICKLED_OBJECTS = ("custom_obj_", "opaque_obj_", "script_obj_")


def check(file: IO[bytes], name: str) -> None:
    """Refuse a ``.pt2`` whose loading would run code of its author.

    Args:
        file: The open file, at its start.
        name: What to call it in an error.

    Raises:
        Refused: Something in it is outside the narrow language; the message names it.
    """
    reader = torch._C.PyTorchFileReader(file)
    records = reader.get_all_records()
    payloads: dict[str, Any] = {}
    for record in records:
        if record.startswith("data/aotinductor/"):
            raise Refused(f"'{name}' holds native code ({record}), which is never loaded.")
        if record.startswith("models/") or (record.startswith("data/") and record.endswith("_config.json")):
            description = json.loads(reader.get_record(record))
            payloads |= _payloads(record, description)
            for problem in _problems(description):
                raise Refused(f"'{name}' may run code of its author when it is opened: {problem}.", hint=_HINT)
    for record in records:
        if record.startswith("data/") and _is_pickled(record, payloads):
            _check_pickle(reader.get_record(record), record, name)


def read(file: IO[bytes]) -> torch.export.ExportedProgram:
    """Load a ``.pt2`` on the CPU; its log lines and warnings are kept quiet."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.export.pt2_archive._package")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(file)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _payloads(record: str, description: Any) -> dict[str, Any]:
    """Return how the members that a weights or constants table lists are stored: ``{record: its entry}``."""
    if not record.endswith("_config.json") or not isinstance(description, dict):
        return {}
    folder = record.rpartition("/")[0]
    return {f"{folder}/{entry['path_name']}": entry for entry in description.get("config", {}).values()}


def _is_pickled(record: str, payloads: dict[str, Any]) -> bool:
    """Tell whether the loader may unpickle a member: everything that no table lists as raw bytes."""
    if record.endswith(".json"):
        return False
    objects = record.rpartition("/")[2].startswith(_PICKLED_OBJECTS)
    return objects or record not in payloads or payloads[record].get("use_pickle") is not False


def _check_pickle(data: bytes, record: str, name: str) -> None:
    """Refuse a pickled member that torch's restricted unpickler, with nothing added, does not read."""
    try:
        if record.rpartition("/")[2].startswith(_PICKLED_OBJECTS):
            raise pickle.UnpicklingError("custom objects are code")
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, TypeError) as error:
        wanted = wanted_globals(_pickle_in(data))
        reason = f"it wants {', '.join(wanted)}" if wanted else str(error).splitlines()[0]
        raise Refused(f"'{name}' has a pickle inside ({record}) that may be code: {reason}.", hint=_HINT) from error


def _pickle_in(data: bytes) -> bytes:
    try:
        return torch._C.PyTorchFileReader(io.BytesIO(data)).get_record("data.pkl")
    except RuntimeError:
        return data


def _problems(value: Any, key: str = "") -> Iterator[str]:
    """Yield what in a description is outside the narrow language (module docstring)."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if not (_PLAIN.fullmatch(name) or (key == "range_constraints" and _is_arithmetic(name))):
                yield f"the name {name[:80]!r}"
            yield from _problems(entry, name)
    elif isinstance(value, list):
        for entry in value:
            yield from _problems(entry, key)
    elif isinstance(value, str) and not _fits(value, key):
        yield f"{key} is {value[:80]!r}"


def _fits(text: str, key: str) -> bool:
    """Tell whether a text is harmless where it stands."""
    if key in _NEVER_READ:
        return True
    if key in ("target", "as_operator"):
        return bool(_OPERATOR.fullmatch(text))
    if key == "expr_str":
        return _is_arithmetic(text)
    if key == "guards_code":
        return _is_arithmetic(text, guards=True)
    if key in ("in_spec", "out_spec"):
        return not text or _is_plain_tree(text)
    return bool((_TEXT if key in ("as_string", "as_strings") else _PLAIN).fullmatch(text))


def _is_arithmetic(text: str, guards: bool = False) -> bool:
    """Tell whether an expression is arithmetic on sizes: no attribute but ``.size()`` of an input, no foreign name."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(_is_arithmetic_node(node, guards) for node in ast.walk(tree))


def _is_arithmetic_node(node: ast.AST, guards: bool) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) or (
            isinstance(node.value, str) and bool(re.fullmatch(r"[\w.+\-]*", node.value))
        )
    if isinstance(node, ast.Name):
        return bool(_SYMBOLIC.fullmatch(node.id)) or (guards and node.id == "L")
    if isinstance(node, ast.Attribute):
        return guards and node.attr in ("size", "stride", "storage_offset")
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name if not guards else ast.Name | ast.Attribute)
    return isinstance(node, _ALLOWED_NODES)


def _is_plain_tree(text: str) -> bool:
    """Tell whether a serialized input or output tree is made of tuples, lists and dicts with plain keys."""
    try:
        _, tree = json.loads(text)
        waiting = [tree]
        for node in waiting:
            keys = json.loads(node["context"]) if node["context"] else None
            if node["type"] not in _TREES or not all(isinstance(key, str | int) for key in keys or ()):
                return False
            if not all(_PLAIN.fullmatch(str(key)) for key in keys or ()):
                return False
            waiting += node["children_spec"]
    except (ValueError, TypeError, KeyError):
        return False
    return True
