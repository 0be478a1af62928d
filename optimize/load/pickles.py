"""Checkpoints: which pickled names may be resolved, which a file wants, and reading one with nothing else resolved.

A pickle is a program that calls whatever names it mentions. An untrusted checkpoint is read by torch's restricted
unpickler (``weights_only=True``), which resolves names through a table instead of importing them. To that table this
file adds what an ordinary saved module mentions: the classes of ``torch.nn.modules`` and its activation functions.

Why the addition opens no hole: a pickle may call an allowed name with any arguments, store it as any attribute of a
module (``forward``, a hook), and so have it called again later. None of the allowed names imports, evaluates text,
opens a file, looks up an attribute by a name from the file, or calls anything but its arguments, which are allowed
names again. What such a pickle can still do is compute and ask for memory: hence the limits of ``guarded.py``.
``getattr``, ``functools.partial`` and everything defined outside torch stay refused.

The format torch.save wrote before 1.6 is five pickles, one after the other, then the raw storages. There, each module
class is wrapped in a record ``("module", class, file name, source text)``, which torch's restricted unpickler refuses.
The records only serve a warning about changed source code, so they are cut out of the stream before it is read, and the
class is left in their place: the restricted unpickler then judges the class as it does in a zip.
"""

from __future__ import annotations

import _compat_pickle
import functools
import io
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from torch import _weights_only_unpickler
from torch.nn import functional

from optimize.errors import Refused
from optimize.load.identify import Kind
from optimize.named import import_from_here
from optimize.wording import named

PICKLES = 5
_MODEL = 3
_Op = tuple[pickletools.OpcodeInfo, Any, int]
_PUTS = ("BINPUT", "LONG_BINPUT")
_TEXTS = ("BINUNICODE", "BINGET", "LONG_BINGET", "NONE")


def opcodes(data: bytes, most: int = PICKLES) -> Iterator[tuple[int, _Op]]:
    """Yield ``(which pickle, opcode)`` for up to ``most`` pickles in a row; stop at what is not a pickle."""
    stream = io.BytesIO(data)
    for which in range(most):
        try:
            for op, argument, at in pickletools.genops(stream):
                yield which, (op, argument, at or 0)
        except (ValueError, UnicodeDecodeError, IndexError):
            return


def without_container_records(file: IO[bytes]) -> IO[bytes]:
    """Return the same legacy file with each module record replaced by the class in it."""
    data = file.read()
    ops = [op for which, op in opcodes(data, _MODEL + 1) if which == _MODEL]
    if not ops or ops[-1][0].name != "STOP":
        return io.BytesIO(data)
    begin, end = ops[0][2], ops[-1][2] + 1
    rewritten = _rewritten(data, ops)
    if rewritten == data[begin:end]:
        file.seek(0)
        return file
    return io.BytesIO(data[:begin] + rewritten + data[end:])


def _rewritten(data: bytes, ops: list[_Op]) -> bytes:
    """Cut the module records out of one pickle.

    A text of a record may be referred to later through the memo, so those texts move to the start of the stream, where
    they stay at the bottom of the stack and disturb nothing.
    """
    kept: list[bytes] = []
    texts: list[bytes] = []
    ends = [at for _, _, at in ops[1:]] + [ops[-1][2] + 1]
    raw = [data[at:end] for (_, _, at), end in zip(ops, ends, strict=True)]
    index = 0
    while index < len(ops):
        length = _record_length(ops, index)
        if not length:
            kept.append(raw[index])
            index += 1
            continue
        names = [op.name for op, _, _ in ops[index : index + length]]
        chosen = names.index("GLOBAL")
        memoized = names[chosen + 1] in _PUTS
        for place, name in enumerate(names):
            if name == "BINUNICODE":
                texts += raw[index + place : index + place + 2]
        kept += raw[index + chosen : index + chosen + 1 + memoized]
        index += length
    return kept[0] + b"".join(texts) + b"".join(kept[1:])


def _record_length(ops: list[_Op], index: int) -> int:
    """Return how many opcodes the module record at ``index`` takes, 0 where there is none."""
    if ops[index][0].name != "MARK":
        return 0
    found: list[str] = []
    cursor = index + 1
    while cursor < len(ops) and len(found) < 6:
        name, argument, _ = ops[cursor]
        if name.name not in _PUTS:
            found.append(name.name)
            if len(found) == 1 and name.name == "BINUNICODE" and argument != "module":
                return 0
        cursor += 1
    first, cls, source_file, source, closing, load = (*found, *[""] * (6 - len(found)))
    fits = first in _TEXTS and cls == "GLOBAL" and source_file in _TEXTS and source in _TEXTS
    return cursor - index if fits and (closing, load) == ("TUPLE", "BINPERSID") else 0


_MARK = pickletools.markobject
#: What honest files only name: called with a size, it gives memory as it was left.
_UNFILLED = {
    f"{cls.__module__}.{cls.__name__}"
    for cls in (torch.Tensor, torch.TypedStorage, torch.UntypedStorage, *torch._tensor_classes)
}
_ACTIVATIONS = (
    functional.celu,
    functional.elu,
    functional.gelu,
    functional.glu,
    functional.hardshrink,
    functional.hardsigmoid,
    functional.hardswish,
    functional.hardtanh,
    functional.leaky_relu,
    functional.log_softmax,
    functional.logsigmoid,
    functional.mish,
    functional.relu,
    functional.relu6,
    functional.rrelu,
    functional.selu,
    functional.sigmoid,
    functional.silu,
    functional.softmax,
    functional.softmin,
    functional.softplus,
    functional.softshrink,
    functional.softsign,
    functional.tanh,
    functional.tanhshrink,
    functional.threshold,
)

TRUST_HINT = (
    "Add --trust if you trust this file (it may then run any code), "
    "or save its state dict and give --model package.module:factory."
)


@functools.cache
def allowed_globals() -> dict[str, Any]:
    """Return what a checkpoint may name beyond torch's own table: ``{"torch.nn.modules.linear.Linear": Linear}``."""
    allowed: dict[str, Any] = {f"{cls.__module__}.{cls.__name__}": cls for cls in _module_classes(torch.nn.Module)}
    return allowed | {f"{function.__module__}.{function.__name__}": function for function in _ACTIVATIONS}


def _module_classes(base: type) -> Iterator[type]:
    """Yield ``base`` and its subclasses that torch.nn.modules itself defines."""
    home = sys.modules.get(base.__module__)
    if base.__module__.startswith("torch.nn.modules.") and getattr(home, base.__name__, None) is base:
        yield base
    subclass: type
    for subclass in base.__subclasses__():
        yield from _module_classes(subclass)


def read_untrusted(file: IO[bytes], kind: Kind, name: str) -> Any:
    """Read a torch.save file on the CPU, resolving no name but the allowed ones.

    Args:
        file: The open file, at its start.
        kind: ``Kind.CHECKPOINT`` or ``Kind.LEGACY``.
        name: What to call the file in an error.

    Returns:
        The saved object.

    Raises:
        Refused: It wants other names (they are listed), is damaged, or asks for more memory than there is.
    """
    source = without_container_records(file) if kind is Kind.LEGACY else file
    wanted = wanted_globals(_pickles(source, kind))
    if wanted:
        raise Refused(f"'{name}' holds code: it wants {named(wanted, 6)}.", hint=TRUST_HINT)
    source.seek(0)
    present = set(map(id, torch.serialization.get_safe_globals()))
    extra: list[Callable | tuple[Callable, str]] = [
        (value, path) for path, value in allowed_globals().items() if id(value) not in present
    ]
    try:
        with torch.serialization.safe_globals(extra):
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Refused(
            f"'{name}' cannot be read as weights: {_reason(error)}", hint="Save or download the file again."
        ) from error


def read_trusted(file: IO[bytes], name: str) -> Any:
    """Read a torch.save file on the CPU, running whatever code it names.

    Raises:
        Refused: A class it names cannot be imported here.
    """
    import_from_here()
    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise Refused(
            f"'{name}' needs code that cannot be imported here: {error}.",
            hint="Run where its classes can be imported under the same names (a class of the script that saved it is "
            "called __main__), or save its state dict and give --model package.module:factory.",
        ) from error


def wanted_globals(pickles: bytes) -> list[str]:
    """Return the names that a run of pickles mentions and that are not allowed; nothing is executed.

    Args:
        pickles: One or more pickles, one after the other; what follows the last one is ignored.
    """
    known = {*_weights_only_unpickler._get_allowed_globals(), *allowed_globals()}
    return sorted({name for name in _globals(pickles) if name not in known})


def _globals(pickles: bytes) -> Iterator[str]:
    """Yield ``module.name`` for each name mentioned, with ``()`` where calling it gives memory as it was left.

    The unpickler refuses what this misses: what is no pickle, or takes what is not on the stack.
    """
    stack, memo = list[Any](), dict[int, Any]()
    for _, (op, argument, _) in opcodes(pickles):
        if "PUT" in op.name or op.name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1] if stack else None
            continue
        first = len(stack) - len(op.stack_before)
        if _MARK in op.stack_before:
            marks = (place for place in reversed(range(len(stack))) if stack[place] is _MARK)
            first = next(marks, 0) - op.stack_before.index(_MARK)
        taken = stack[max(first, 0) :]
        del stack[max(first, 0) :]
        if op.name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_modern_name(*(str(argument).split(" ", 1) if argument else (*map(str, taken), "", "")[:2])))
            yield stack[-1]
        elif "GET" in op.name or "UNICODE" in op.name:
            stack.append(memo.get(argument) if "GET" in op.name else argument)
        elif "TUPLE" in op.name:
            stack.append(tuple(value for value in taken if value is not _MARK))
        elif op.name == "STOP":
            stack, memo = [], {}
        else:
            stack += [made if made is _MARK else None for made in op.stack_after]
        if op.name in ("REDUCE", "NEWOBJ") and len(taken) == 2:
            called, given = taken
            if called == "torch._tensor._rebuild_from_type_v2":  # which calls what comes first
                rebuilds = isinstance(given, tuple) and str(*given[:1]).startswith("torch._utils._rebuild_")
                called = "" if rebuilds else "torch.Tensor"
            if called in _UNFILLED:
                yield f"{called}()"


def _modern_name(module: str, name: str) -> str:
    """Translate a Python 2 name, which is what pickle protocol 2 writes (``__builtin__ set``)."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


def _pickles(file: IO[bytes], kind: Kind) -> bytes:
    if kind is Kind.LEGACY:
        return file.read()
    return torch._C.PyTorchFileReader(file).get_record("data.pkl")


def _reason(error: Exception) -> str:
    """Return the sentence of torch's long message that says what it met."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = next((line for line in lines if "WeightsUnpickler error:" in line), lines[0] if lines else repr(error))
    return line.partition("WeightsUnpickler error:")[2].strip() or "a pickle that torch does not understand"
