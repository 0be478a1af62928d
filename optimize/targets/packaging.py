"""From a program and a written file to an ``Artifact``."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optimize import processor
from optimize.errors import Refused
from optimize.regular import open_zip
from optimize.targets.base import SAID, Artifact, Coverage, FloatLayer, Target, TensorSpec, file_digest
from optimize.wording import plural

if TYPE_CHECKING:
    from torch import fx
    from torch.utils import _pytree as pytree

    from optimize.program import Program

_Converted = TypeVar("_Converted")
#: Where archives of torch say what they are, and how much of that is read.
_IN_ARCHIVE, _LONGEST = "extra/optimize.", 4096
#: Kernels of integers in the code of TorchScript, and of inductor; and how much code is read for them.
_INTEGERS, _MOST_CODE = re.compile(rb"\bops\.quantized\.|\bquantized_decomposed\."), 1 << 20


def describe(
    target: Target, program: Program, path: Path, *, output_names: Sequence[str] = (), **more: Any
) -> Artifact:
    """Return the artifact of a file just written, with the program's inputs and outputs.

    Args:
        target: What wrote it.
        program: What was written.
        output_names: Of the outputs in the file, where it has names of its own.
        more: Other fields of the artifact; its precision is the program's and its versions are the target's otherwise.
            ``stored`` says how weights of few bits are, where that is otherwise than the target's files have them.
    """
    from torch.utils import _pytree as pytree

    cpu = made_for(target, program)
    promise = _promise(target, program, cpu) if cpu and target.portable else ""
    half = target.without_bfloat16 if program.precision.endswith("bfloat16") else ""
    stored = more.pop("stored", "") or _stored(target, program)
    notes = (*more.pop("notes", ()), *filter(None, (promise, half, stored)))
    return replace(
        describe_file(target.name, path, target.files(path), input_specs(program), trust=True),
        notes=notes,
        cpu=cpu,
        is_lossy=any(done.is_lossy for done in program.applied),
        outputs=output_specs(program, output_names),
        out_spec=_written(program.out_spec) or _written(pytree.tree_structure((0,) * len(program.outputs))),
        in_spec=_written(program.in_spec),
        **{"precision": program.precision, "versions": dict(target.available().version), **more},
    )


def _written(spec: pytree.TreeSpec) -> str:
    """Return how values are arranged as text; empty where classes or keys of the model's own arrange them."""
    from torch.utils import _pytree as pytree

    with suppress(Exception):
        text = pytree.treespec_dumps(spec)
        return text if pytree.treespec_loads(text) == spec else ""
    return ""


def _stored(target: Target, program: Program) -> str:
    """Say how bits were shared out among weights, or how few are stored and computed with; else nothing."""
    plan = program.quantization
    if plan is None or plan.mode == "dynamic" or (plan.mode == "weights" and not plan.grids):
        return ""
    counts = sorted(Counter(map(plan.bits_of, plan.layers)).items())
    said = ", ".join(f"{bits} for {plural(count, 'layer')}" for bits, count in counts)
    if plan.mode == "weights":
        return f"Bits by what each weight does to the answers: {said}."
    if plan.bits == 8:
        return ""
    if not target.packs:
        return f"Its weights have {plan.bits:g} bits and are stored in 8, which it computes with."
    is_shared = any(bits < plan.bits for bits, _ in counts)
    what = f"{plan.bits:g} bits on average ({said})" if is_shared else f"{plan.bits:g} bits"
    stored = "as few" if is_shared else f"{math.ceil(plan.bits)}"
    return f"Weights of {what} are stored in {stored} and become INT8 when it is opened, which it computes with."


def _promise(target: Target, program: Program, cpu: str) -> str:
    """Return where the integers of a file are right, why, and what that took from its weights."""
    from optimize import graph, ops
    from optimize.quantization.grid import room_bits
    from optimize.quantization.numerics import planned

    plan = program.plan
    layers = [
        node
        for node in graph.calls(program.graph, *ops.CONVOLUTIONS, graph.aten.linear.default)
        if node.name in plan.layers
    ]
    weights = {node: graph.constant(program.graph_module, graph.argument(node, "weight")) for node in layers}
    forms = {node: planned(target.numerics.weight, plan, node.name) for node in layers}
    room = room_bits((weight, forms[node]) for node, weight in weights.items() if weight is not None)
    return processor.promise(cpu, target.integers_on, room)


def made_for(target: Target, program: Program) -> str:
    """Return the processors that the integers of a file are right on, for it to say; empty of floats and of GPUs.

    Of a file that is compiled for the machine it is made on, that machine's, whatever the plan says.
    """
    plan = program.quantization
    if plan is None or plan.mode == "weights" or not target.numerics.weight.pairs:
        return ""
    return plan.cpu if target.portable or not processor.adds_pairs(plan.cpu) else processor.host().level


def say_in_archive(path: Path, said: Mapping[str, str]) -> None:
    """Write into an archive of torch what it is, by key, where ``torch.jit.save`` has extra files."""
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        for key, text in said.items():
            archive.writestr(zipfile.ZipInfo(f"{root}/{_IN_ARCHIVE}{key}"), text)


def said_in_archive(path: Path, key: str) -> str:
    """Return what :func:`say_in_archive` wrote; empty where it is not there."""
    with suppress(Exception), open_zip(path) as archive:  # every unpacker of zipfile's has its own
        found = [name for name in archive.namelist() if name.partition("/")[2] == _IN_ARCHIVE + key]
        with archive.open(found[0]) if found else nullcontext(io.BytesIO()) as file:
            return file.read(_LONGEST).decode("utf-8", "replace")
    return ""


def _computes_integers(path: Path) -> bool:
    """Say whether the code in an archive of torch, as far as it is read, calls kernels of integers."""
    with suppress(Exception), open_zip(path) as archive:
        code = [name for name in archive.namelist() if name.endswith((".py", ".wrapper.cpp"))]
        return any(_INTEGERS.search(archive.open(name).read(_MOST_CODE)) for name in code[:_LONGEST])
    return False


def open_archive(target: Target, path: Path, *, trust: bool) -> Artifact:
    """Return the artifact of an archive of torch; what it takes is not written in it."""
    said = {key: said_in_archive(path, key) for key in SAID}
    precision = "int8" if _computes_integers(path) else ""
    return describe_file(target.name, path, precision=precision, said=said, trust=trust)


def of_chance(operators: Collection[str]) -> tuple[str, ...]:
    """Return what is noted of a file with operators that draw numbers, or keep a state: they are named."""
    named = ", ".join(sorted(operators))
    return (f"It draws numbers, or keeps a state, by {named}: asked twice, it may answer otherwise.",) if named else ()


def describe_file(
    target: str,
    path: Path,
    files: Sequence[Path] = (),
    inputs: Sequence[TensorSpec] = (),
    *,
    trust: bool,
    precision: str = "",
    said: Mapping[str, str] | None = None,
) -> Artifact:
    """Return the artifact of a file that somebody else wrote.

    Args:
        target: What runs it.
        files: All that it consists of, ``path`` first; ``path`` alone by default.
        inputs: What it takes; nothing where that is not known.
        trust: Whether it may be run in a process that is not confined.
        precision: As the file tells it.
        said: What it says of itself, by the words of ``SAID``.
    """
    there = [file for file in files or (path,) if file.is_file()]
    size_bytes = sum(file.stat().st_size for file in there)
    beside = tuple(Path(os.path.relpath(file, path.parent)).as_posix() for file in there if file != path)
    words: dict[str, Any] = {key: (said or {}).get(key, "") for key in SAID}
    words |= {"cpu": processor.known(words["cpu"], precision), "untrusted": not trust, "beside": beside}
    return Artifact(target, path, tuple(inputs), (), precision, file_digest(*there), size_bytes, "", **words)


def input_specs(program: Program) -> tuple[TensorSpec, ...]:
    """Return the program's inputs, free dimensions by name."""
    from optimize.graph import dtype_name

    return tuple(
        TensorSpec(name, tuple(dims.get(dim, size) for dim, size in enumerate(tensor.shape)), dtype_name(tensor))
        for name, tensor, dims in zip(program.input_names, program.inputs, program.dynamic, strict=True)
    )


def output_specs(program: Program, names: Sequence[str] = ()) -> tuple[TensorSpec, ...]:
    """Return the program's flat outputs, free dimensions by the inputs' names (an expression of them as text)."""
    from optimize.graph import dtype_name

    symbols, names = program.symbols(), names or program.output_names
    specs = []
    for index, node in enumerate(program.outputs):
        value = node.meta["val"]
        shape = tuple(size if isinstance(size, int) else symbols.get(str(size), str(size)) for size in value.shape)
        specs.append(TensorSpec(names[index], shape, dtype_name(value)))
    return tuple(specs)


def require_layers(placed: Coverage, runtime: str) -> None:
    """Check that some layer runs in INT8.

    Raises:
        Refused: None does; the message gives the first reasons.
    """
    if not placed.quantized:
        reasons = "; ".join(f"'{layer.name}': {layer.reason}" for layer in placed.left_float[:3])
        raise Refused(f"No layer can run in INT8 on {runtime}: {reasons}.", hint="Leave --int8 out for this target.")


def versions_of(*names: str) -> dict[str, str]:
    """Return the versions of those distributions that are installed, by name."""
    from importlib import metadata  # as slow to import as the rest of a worker's own code

    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def lacking_compiler() -> tuple[str, str]:
    """Return that inductor finds no C++ compiler and what to install; empty where there is one."""
    if shutil.which(os.environ.get("CXX", "g++")) is not None:
        return "", ""
    return "no C++ compiler (g++, or what the variable CXX names) was found", "apt install g++"


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Let a variable of this process's environment have a value meanwhile, for libraries that ask for nothing else."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def planned_floats(program: Program) -> tuple[FloatLayer, ...]:
    """Return what the quantization plan itself leaves in float, with its reasons."""
    reasons = program.quantization.left_float if program.quantization is not None else {}
    return tuple(float_layer(node, reasons[node.name]) for node in program.graph.nodes if node.name in reasons)


def float_layer(node: fx.Node, reason: str) -> FloatLayer:
    """Return what is told of a call of the program that runs in float."""
    from optimize import graph

    return FloatLayer(graph.origin(node), graph.op_name(node), reason)


def convert_layers(
    nodes: Iterable[fx.Node], convert: Callable[[fx.Node], _Converted]
) -> tuple[dict[fx.Node, _Converted], list[FloatLayer]]:
    """Return what each layer becomes on integers, and those that ``convert`` refuses, with its reason."""
    done, left = {}, []
    for node in nodes:
        try:
            done[node] = convert(node)
        except Refused as refusal:
            left.append(float_layer(node, refusal.what))
    return done, left
