"""What a mutated file says where an honest one says a name, a number or a text."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

#: The file that any code of a mutated file makes. No identifier has its exclamation mark: where it is found in source
#: code that is compiled, text of the file came there as it was.
SIGN = "mark!er"
MARKER = Path(f"/tmp/optimize-{SIGN}")  # the same in every process, so that a case is the same when it is made again
#: Names that only code has: found as names in compiled source beside the sign, the file wrote that source.
CALLED = frozenset({"__import__", "exec", "eval", "open", "os", "system"})

DANGEROUS = (
    ("os", "system"), ("posix", "system"), ("nt", "system"), ("builtins", "eval"), ("builtins", "exec"),
    ("builtins", "open"), ("io", "open"), ("builtins", "getattr"), ("builtins", "setattr"), ("builtins", "__import__"),
    ("builtins", "breakpoint"), ("subprocess", "Popen"), ("subprocess", "run"), ("importlib", "import_module"),
    ("functools", "partial"), ("functools", "reduce"), ("operator", "attrgetter"), ("operator", "methodcaller"),
    ("runpy", "run_path"), ("pty", "spawn"), ("socket", "socket"), ("shutil", "rmtree"), ("torch", "load"),
    ("torch.hub", "load"), ("torch.ops", "load_library"), ("torch.classes", "load_library"),
    ("torch.utils.cpp_extension", "load_inline"), ("torch.jit", "load"), ("torch.jit._script", "script"),
    ("torch.fx.graph_module", "reduce_graph_module"), ("torch.fx._symbolic_trace", "symbolic_trace"),
    ("torch.serialization", "load"), ("torch.storage", "_load_from_bytes"), ("pickle", "loads"), ("marshal", "loads"),
    ("types", "FunctionType"), ("types", "CodeType"), ("code", "interact"), ("antigravity", "x"), ("this", "s"),
)  # fmt: skip
ODD = (
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"), ("torch", "FloatStorage"),
    ("torch._utils", "_rebuild_parameter_with_state"), ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._utils", "_rebuild_sparse_tensor"), ("torch._utils", "_rebuild_qtensor"), ("torch", "Size"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"), ("torch._utils", "_rebuild_nested_tensor"),
    ("torch._utils", "_rebuild_wrapper_subclass"), ("torch", "Tensor"), ("torch", "device"), ("torch", "float64"),
    ("collections", "OrderedDict"), ("collections", "Counter"), ("builtins", "set"), ("builtins", "bytearray"),
    ("builtins", "complex"), ("builtins", "slice"), ("_codecs", "encode"), ("torch.nn.modules.linear", "Linear"),
    ("torch.nn.modules.module", "Module"), ("torch.nn.modules.container", "Sequential"), ("torch.nn", "Parameter"),
    ("torch.nn.modules.conv", "Conv2d"), ("torch.nn.modules.rnn", "LSTM"), ("torch.nn.functional", "relu"),
    ("torch.nn.modules.batchnorm", "SyncBatchNorm"), ("torch.nn.modules.lazy", "LazyModuleMixin"),
    ("torch.nn.modules.container", "ModuleDict"), ("torch.nn.modules.activation", "MultiheadAttention"),
    ("torch.nn.parameter", "UninitializedParameter"), ("", ""), ("torch.nn.modules.linear", "Linear.__init__"),
    ("torch.nn.modules.module", "Module.__setstate__"), ("a b", "c\nd"),
)  # fmt: skip
#: Counts and sizes at the edges of the types that hold them.
NUMBERS = (
    0, 1, 2, 3, -1, -2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32,
    2**40, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**30,
)  # fmt: skip
_COMMAND = f"__import__('os').system('touch {MARKER}')"
_OPEN = f"open('{MARKER}','w')"
TEXTS = (
    _COMMAND, f"{_OPEN}.close()", f"x={_COMMAND}", f"x, y={_OPEN}", f"x):\n    {_OPEN}\n    return (", f"\\\n{_OPEN}",
    f"'+{_COMMAND}+'", f'"+{_COMMAND}+"', f'"""+{_COMMAND}+"""', f"#\n{_OPEN}\n#", f"# {_OPEN}", f"x\r{_OPEN}",
    f"x\f{_OPEN}", f"x\u2028{_OPEN}", f"x;{_OPEN}", f"a.b if {_OPEN} else c", f"[{_OPEN} for _ in [1]]",
    f"{{{_OPEN}}}", f"${{{_OPEN}}}", f"f'{{{_OPEN}}}'", f"lambda: {_OPEN}", str(MARKER), f"../../../..{MARKER}",
    f"file://{MARKER}", "", " ", ".", "..", "../x", "/etc/passwd", "/dev/zero", "/dev/stdin", "con", "a/b", "a\\b",
    "a\0b", "\ud800", "\U0001f600", "e\u0301", "\u202eabc", "\u212a", "\u017f", "class", "def", "None", "True", "self",
    "__class__", "__dict__", "__init__", "__getattr__", "__setstate__", "__reduce__", "_modules", "_parameters",
    "_buffers", "forward", "training", "weight", "bias", "x", "0", "-0", "1e999", "9" * 30, "nan", "Infinity",
    "-Infinity", "9**9**9**9", "a" * 300, "a" * 70_000, "a." * 2000 + "a", "%s%n", "{0.__class__}", "<!DOCTYPE x>",
    "&amp;", "]]>", "\x1b[2J", "::error::x", "aten.from_file.default", "torch.ops.aten.save", "aten::save", "cuda:0",
    "meta", "torch.os.system", "builtins.eval", "os.system",
)  # fmt: skip


@functools.cache
def operators() -> tuple[tuple[str, str], ...]:
    """Return every operator that torch has registered, as ``("aten::conv2d", "default")``."""
    found = {(schema.name, schema.overload_name or "default") for schema in torch._C._jit_get_all_schemas()}
    return tuple(sorted(found))


def operator(chance: random.Random) -> str:
    """Return a registered operator as a graph of torch.export names it."""
    name, overload = chance.choice(operators())
    library, _, short = name.partition("::")
    return f"{chance.choice(('torch.ops.', ''))}{library}.{short}.{overload}"


def text(chance: random.Random, known: Sequence[str] = ()) -> str:
    """Return a hostile text, an operator, or one of the texts that the file itself has."""
    kind = chance.random()
    if known and kind < 0.3:
        return chance.choice(known)
    return operator(chance) if kind < 0.4 else chance.choice(TEXTS)


def value(chance: random.Random, known: Sequence[str] = ()) -> Any:
    """Return a value of any JSON type."""
    return chance.choice((
        lambda: text(chance, known),
        lambda: chance.choice(NUMBERS),
        lambda: -chance.choice(NUMBERS),
        lambda: chance.choice((None, True, False, 0.5, -0.0, 1e308, float("nan"), float("inf"))),
        list,
        dict,
        lambda: [text(chance, known)] * chance.randrange(1, 4),
        lambda: {text(chance, known): chance.choice(NUMBERS)},
        lambda: nested(chance.choice((3, 70, 900))),
    ))()  # fmt: skip


def nested(depth: int) -> Any:
    """Return lists inside one another."""
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found
