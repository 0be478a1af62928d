"""TorchScript: one file that runs wherever torch does, without this package or the model's code."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimize import files
from optimize.registry import register_target
from optimize.targets import packaging
from optimize.targets.base import FLOATS, INT8, Artifact, Availability, Coverage, Probing, Runner, Support, Target

if TYPE_CHECKING:
    import torch

    from optimize.plan import Quantization
    from optimize.program import Program
    from optimize.targets.probe import Probe


#: Measured with oneDNN held down to AVX512-VNNI and to AVX2.
_WIDENED = (
    "bfloat16 needs AVX512-BF16 or AMX: elsewhere torch widens every operand and answers alike, but a ResNet-18 and a "
    "ViT took twice as long as in float32 with AVX-512 alone, and the ResNet 19 times as long with AVX2."
)

#: What hides what it does from who reads a graph; arguments with which nothing is drawn where they are false or 0.
_HIDING = ("prim::CallMethod", "prim::CallFunction", "prim::fork")
_INERT = ("train", "training", "dropout", "dropout_p")
#: What asks whether somebody records gradients, as measuring does not.
_MODES = ("aten::is_grad_enabled", "aten::is_inference", "prim::requires_grad")
#: What gives memory as it was left, what fills all of a tensor, and what asks of what kind one is but reads no number.
_UNCLEARED = re.compile(r"aten::(\w*empty\w*|resize_\w*)")
_FILLING = re.compile(r"aten::(copy|fill|zero|normal|log_normal|uniform|exponential|bernoulli|random|geometric)_")
_DESCRIBING = re.compile(
    r"prim::(dtype|device|layout|shape|is_\w+|itemsize|nbytes|requires_grad)|aten::(\w+_like|new_(empty|full|ones|zeros)|"
    "size|dim|numel|len|stride|device|element_size|is_(complex|contiguous|floating_point))"
)


@register_target
class TorchScript(Target):
    """Scripts the graph, freezes it and saves it; the file takes the flat inputs, returns a tensor or a flat tuple.

    Freezing folds the weights into the code and is exact; it keeps the batch free. Nothing is traced, so nothing is run
    that could abort the process, and no child process is needed. A ``program.compiled`` is used as it stands.

    INT8 runs on ``torch.ops.quantized``. Weights are packed again when the file is loaded, for the engine of that
    process (``torch.backends.quantized.engine``; ``x86`` by default on x86-64).
    """

    name = "torchscript"
    suffix = ".torchscript.pt"
    summary = "TorchScript file for any process with torch, Python or C++; float32, float16, bfloat16 and INT8 on CPU."
    support = Support(FLOATS, INT8, remark="INT8 on x86 with AVX2, with torch's own kernels.")
    profiled = times_layers = True
    integers_on = "every x86 with AVX2"  # torch's engines for others lack the product that gives floats
    without_bfloat16 = _WIDENED
    alone = """
import torch

model = torch.jit.load(path)

def f(*arrays):
    with torch.inference_mode():
        found = model(*map(torch.from_numpy, arrays))
    return [output.numpy() for output in (found if isinstance(found, tuple) else (found,))]
"""

    def available(self) -> Availability:
        """Say that torch, which this package needs anyway, is all it takes."""
        return Availability(export=True, run=True, version={"torch": importlib.metadata.version("torch")})

    def export(self, program: Program, path: Path) -> Artifact:
        """Write the program as TorchScript.

        Raises:
            Refused: TorchScript lacks something the program uses, or no layer can run in INT8.
        """
        from optimize.precision.lowering import refuse_mixed

        refuse_mixed(program, "TorchScript")
        coverage, notes = None, []
        if program.quantization is None:
            scripted = _compile(program)
        else:
            from optimize.targets.torchscript.packing import fresh_engine

            with fresh_engine():
                scripted, coverage = _compile_int8(program)
                notes = _int8_notes(program, program.quantization)
        with files.whole(path) as temporary:
            temporary.write_bytes(_saved(scripted))
            if cpu := packaging.made_for(self, program):
                packaging.say_in_archive(temporary, {"cpu": cpu})
        return packaging.describe(self, program, path, coverage=coverage, notes=tuple(notes))

    def open(self, path: Path, *, trust: bool = False) -> Artifact:
        """Describe a file whose kind is known; what it takes is not written in it."""
        return packaging.open_archive(self, path, trust=trust)

    def label(self, path: Path, said: Mapping[str, str]) -> None:
        """Write what became of a file beside its code, as one of its extra files."""
        packaging.say_in_archive(path, said)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load the file; ``threads`` sets torch's threads, which all its work in this process shares."""
        import torch

        from optimize.targets.torch_runner import TorchRunner

        with warnings.catch_warnings(action="ignore"):
            module = torch.jit.load(str(artifact.path), map_location="cpu")
        runner = TorchRunner(artifact, module, threads)
        runner.watch(*_of_chance(module))
        graph: Any = module.inlined_graph
        runner.asks_mode = any(node.kind() in _MODES for node in _nodes(graph))
        return runner

    def probe(self, asked: Probing) -> Probe:
        """Load the file for torch's profiler."""
        from optimize.targets.torch_probe import TorchProbe

        return TorchProbe(self.load(asked.artifact, threads=asked.threads), asked)


def _of_chance(module: torch.jit.ScriptModule) -> tuple[set[str], list[torch.Tensor], bool]:
    """Return by what a file draws numbers or keeps a state, its tensors that may be written into, and if it sets more.

    What hangs on its own settings, such as what it does in training, is decided before; a tensor may be written into
    where nothing tells it from what is. Memory that nobody cleared is what the run before has left: a state where it
    is read first, a doubt where a part of it is filled, for who fills one part mostly fills the others.
    """
    import torch

    # Freezing takes memory of a size that is its own for a constant: it is looked for before.
    graph: Any = module.inlined_graph  # its nodes are gone with it
    uncleared = [node for node in _nodes(graph) if _is_uncleared(node)]
    uses = [(node.kind(), _first_use(node, node.output())) for node in uncleared]
    found = {kind for kind, use in uses if use != "fills"}
    written, is_stateful = list[torch.Tensor](), any(use == "reads" for _, use in uses)
    with suppress(RuntimeError):  # what cannot be frozen is read as it is
        module = torch.jit._recursive.wrap_cpp_module(torch._C._freeze_module(module._c, [], True, True))
    graph = module.inlined_graph
    aliases = graph.alias_db()
    for node in _nodes(graph):
        kind, sets = node.kind(), node.kind() == "prim::SetAttr"
        if kind in ("prim::GetAttr", "prim::Constant") and aliases.has_writers(node.output()):
            value = _held(module, node)
            sets = not isinstance(value, torch.Tensor)
            written += [] if sets else [value]
        elif sets:
            sets = next(node.inputs()).node().kind() != "prim::CreateObject"
        found |= {kind} if sets or kind in _HIDING or _draws(node) or _strays(module, node) else set()
        is_stateful |= sets
    return found, written, is_stateful


def _held(module: torch.jit.ScriptModule, node: torch._C.Node) -> Any:
    """Return the constant or the attribute of a module that a node of its graph gives."""
    if node.kind() != "prim::GetAttr":
        return node.output().toIValue() if node.kind() == "prim::Constant" else module
    return getattr(_held(module, next(node.inputs()).node()), node.s("name"), None)


def _nodes(block: Any) -> Iterator[torch._C.Node]:
    """Yield the nodes of a graph or block in order, with those of the blocks inside."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _is_uncleared(node: torch._C.Node) -> bool:
    """Say whether a node gives memory as it was left; none does that is given a constant size of 0."""
    if not _UNCLEARED.fullmatch(node.kind()):
        return False
    lists = (value.node() for value in node.inputs() if value.node().kind() == "prim::ListConstruct")
    sizes = next(lists, None)  # strides follow them
    return sizes is None or all(size.toIValue() != 0 for size in sizes.inputs())


def _first_use(node: torch._C.Node, value: torch._C.Value) -> str:
    """Return what is done first with a tensor that a node gives: ``fills`` all of it, ``reads`` it, or ``else``.

    What fills it in one branch or a loop, which may not be taken, counts for what follows in there alone.
    """
    import torch

    values = [value, *[next(node.inputs())][: "resize" in node.kind()]]
    users = [use.user for one in values for use in one.uses() if use.user.isAfter(node)]
    users = [user for user in users if not _DESCRIBING.fullmatch(user.kind())]
    filled = set[Any]()
    while users:
        user = functools.reduce(lambda one, other: other if other.isBefore(one) else one, users)
        if not user.kind().startswith("aten::"):
            return "else"
        pairs = zip(torch._C.parse_schema(user.schema()).arguments, user.inputs(), strict=True)
        alias, *others = [argument.alias_info for argument, given in pairs if given in values]
        if others or alias is None:
            return "reads"
        if not _FILLING.fullmatch(user.kind()):  # the "out" of an operator may be larger than what comes out
            is_seen = not alias.is_write and user.outputsSize() == 1
            return "reads" if is_seen and _first_use(user, user.output()) == "reads" else "else"
        filled.add(block := user.owningBlock())
        while (owner := block.owningNode()) and owner.kind() == "prim::If" and filled.issuperset(owner.blocks()):
            filled.add(block := owner.owningBlock())
        if owner is None or node.owningBlock() in filled:
            break
        users = [one for one in users if one is not user and (not one.isAfter(user) or one.isAfter(owner))]
    return "fills"


def _draws(node: torch._C.Node) -> bool:
    """Say whether a node draws numbers: not what drops none, or does so in training alone."""
    import torch

    packet = getattr(torch.ops.aten, node.kind().removeprefix("aten::"), None)
    tags = getattr(packet, packet.overloads()[0]).tags if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    given = zip(torch._C.parse_schema(node.schema()).arguments, node.inputs(), strict=True)
    return not any(argument.name in _INERT and value.toIValue() in (0, False) for argument, value in given)


def _strays(module: torch.jit.ScriptModule, node: torch._C.Node) -> bool:
    """Say whether an integer layer may give memory as it was: it sums over nothing, or reads where a mapping leads."""
    import torch

    kind, inputs = node.kind(), [*node.inputs()]
    if kind.startswith("quantized::embedding_bag"):  # weights of samples may be too few
        return any(not value.node().mustBeNone() for value in inputs[6:8])
    if not kind.startswith("quantized::linear") or "pack" in kind:
        return False
    held = _held(module, next(value.node() for value in inputs if "PackedParams" in value.type().annotation_str))
    return not isinstance(held, torch.ScriptObject) or 0 in held.unpack()[0].shape  # type: ignore[attr-defined]


def _compile(program: Program) -> torch.jit.ScriptModule:
    import torch

    from optimize.scripting import compile_graph

    with warnings.catch_warnings(action="ignore"):
        return torch.jit.freeze(
            _alone(program.compiled or compile_graph(program.graph_module)), optimize_numerics=False
        )


def _compile_int8(program: Program) -> tuple[torch.jit.ScriptModule, Coverage]:
    import torch

    from optimize.scripting import compile_graph
    from optimize.targets.torchscript.lowering import coverage, lower

    with warnings.catch_warnings(action="ignore"):
        lowered = lower(program)
        kept = list(lowered.packed_at_load)
        alone = _alone(compile_graph(lowered.module))
        scripted = torch.jit.freeze(alone, preserved_attrs=kept, optimize_numerics=False)
    return scripted, coverage(lowered, scripted)


def _int8_notes(program: Program, plan: Quantization) -> list[str]:
    import torch

    from optimize.precision.host import half_layers

    version = torch.__version__.split("+")[0]
    if plan.mode == "weights":
        return [
            f"Layers with integer weights use private operators of torch {version}: pin that release where the file "
            "runs. They multiply in bfloat16."
        ]
    notes = [
        f"INT8 was lowered and checked with torch {version}, engine '{torch.backends.quantized.engine}': pin that "
        "release where the file runs. Its quantized tensor types print a deprecation warning there."
    ]
    if half_layers(program, plan):
        notes.append("Products left in float multiply in bfloat16, as this CPU does fast; export again on others.")
    return notes


def _alone(scripted: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Return a module apart from what else this process has compiled, which would number the names in its file."""
    import torch

    with warnings.catch_warnings(action="ignore"):
        return torch.jit.load(io.BytesIO(_saved(scripted)), map_location="cpu")


def _saved(scripted: torch.jit.ScriptModule) -> bytes:
    """Return a file, made in memory: saving to a path would write that path's name into it."""
    import torch

    buffer = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(scripted, buffer)
    return buffer.getvalue()
