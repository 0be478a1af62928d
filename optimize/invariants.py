"""What every program must satisfy, as a table: run between passes, each with a test that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from optimize import graph, ops
from optimize.distances import output_error
from optimize.errors import VerificationFailed
from optimize.graph import aten
from optimize.program import Program

#: What is exact may differ by re-association of float sums: error relative to the largest output.
EXACT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


#: What may differ by its rounding alone, in roundings of the network's own.
_ROUNDINGS = 4.0


def allowed_errors(program: Program, inputs: Sequence[torch.Tensor]) -> list[float]:
    """Return how far each output of what is exact may be, of its largest value.

    Deep networks can amplify rounding a thousandfold: it is as far, some times, as an output moves where each weight
    moves by a unit in its last place. What is drawn at random is drawn alike for both.
    """
    moved, draw = program.clone(), torch.Generator().manual_seed(0)
    for weight in moved.graph_module.parameters():
        if weight.is_floating_point():
            up = torch.rand(weight.shape, generator=draw) < 0.5
            weight.data.mul_(1 + torch.finfo(weight.dtype).eps * torch.where(up, 1.0, -1.0).to(weight))
    answers = []
    with torch.random.fork_rng(devices=[]):
        for each in (program, moved):
            torch.manual_seed(0)
            answers.append(each.run(inputs))
    own = (output_error(want, got) for want, got in zip(*answers, strict=True))
    usual = (EXACT_TOLERANCE.get(want.dtype, 0.0) for want in answers[0])
    return [max(most, _ROUNDINGS * error / scale) for most, (error, scale) in zip(usual, own, strict=True)]


def node_kinds(program: Program) -> Iterator[str]:
    """Only placeholders, weights, calls of ATen overloads and one output."""
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            yield f"'{node.name}' is a {node.op}"
        elif node.op == "call_function" and not _is_legal_target(node.target):
            yield f"'{node.name}' calls {node.target}, which is not an ATen overload"


def _is_legal_target(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) or target in ops.OF_SIZES.values()


def weights_owned(program: Program) -> Iterator[str]:
    """No weight shares memory with the user's module."""
    if program.source is None:
        return
    theirs = {t.untyped_storage().data_ptr() for t in (*program.source.parameters(), *program.source.buffers())} - {0}
    for path, tensor in (*program.graph_module.named_parameters(), *program.graph_module.named_buffers()):
        if tensor.untyped_storage().data_ptr() in theirs:
            yield f"weight '{path}' shares memory with the source module"


def values_typed(program: Program) -> Iterator[str]:
    """Every value carries its shape and dtype, and a weight's are those of its tensor."""
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        if value is None:
            yield f"'{node.name}' carries no shape"
        elif node.op == "get_attr":
            tensor = graph.attribute(program.graph_module, str(node.target))
            if tuple(tensor.shape) != tuple(value.shape) or tensor.dtype != value.dtype:
                yield f"weight '{node.target}' is {list(tensor.shape)} but its value says {list(value.shape)}"


def functional(program: Program) -> Iterator[str]:
    """No call writes to its inputs."""
    for node in program.graph.nodes:
        target = node.target
        if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            yield f"'{node.name}' ({graph.op_name(node)}) writes to its input"


def inference_form(program: Program) -> Iterator[str]:
    """No dropout, no update of running statistics, no gradients."""
    for node in graph.calls(program.graph, aten.dropout.default, aten.native_dropout.default):
        yield f"'{node.name}' is a dropout"
    for node in graph.calls(program.graph, aten.batch_norm.default):
        if graph.argument(node, "training") and graph.argument(node, "running_mean") is not None:
            yield f"'{node.name}' updates its running statistics"
    for path, tensor in program.graph_module.named_parameters():
        if tensor.requires_grad:
            yield f"weight '{path}' requires a gradient"


def nothing_attached(program: Program) -> Iterator[str]:
    """No hooks, no guards."""
    module = program.graph_module
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        yield "the graph module carries hooks"
    if hasattr(module, "_guards_fn"):
        yield "the graph module carries guards"


def quantization_placed(program: Program) -> Iterator[str]:
    """Every name in the quantization plan is a node of the graph."""
    if program.quantization is None:
        return
    names = {node.name for node in program.graph.nodes}
    plan, half = program.quantization, program.quantization.half
    named = {*plan.layers, *plan.tables, *plan.ranges, *(half.halves | half.floats if half else ())}
    for name in sorted(named - names):
        yield f"the quantization plan names '{name}', which is not in the graph"


#: Checked after every pass.
INVARIANTS: tuple[Callable[[Program], Iterator[str]], ...] = (
    node_kinds,
    weights_owned,
    values_typed,
    functional,
    inference_form,
    nothing_attached,
    quantization_placed,
)


def check(program: Program) -> None:
    """Check every invariant. That torch exports the graph again, seconds on a large model, ``Program.export`` says.

    Raises:
        VerificationFailed: The first three violations, with the invariant's name.
    """
    for invariant in INVARIANTS:
        violations = list(invariant(program))
        if violations:
            raise VerificationFailed(f"Invariant '{invariant.__name__}' is broken: {'; '.join(violations[:3])}.")
