"""From a half plan to casts in the graph; beside a quantization plan, as the runtime's integer kernels want them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

import torch
from torch import fx

from optimize.errors import Refused
from optimize.plan import HalfPlan
from optimize.precision.casting import is_concerned, write_casts
from optimize.precision.placement import assign, follow_widest
from optimize.program import Program, tensor_value


def in_half(program: Program, plan: HalfPlan, floats: Collection[str] = ()) -> set[fx.Node]:
    """Return the nodes to compute in half, with the fewest casts.

    Args:
        program: In float32.
        plan: What must be in half and what in float32.
        floats: Names of more nodes that must be in float32.
    """
    concerned = [node for node in program.graph.nodes if is_concerned(node)]
    outside = plan.floats.union(floats)
    halves = {node for node in concerned if node.name in plan.halves and node.name not in outside}
    choose = follow_widest if plan.policy == "O1" else assign
    return choose(program.graph, concerned, halves, {node for node in concerned if node.name in outside})


def write_half(program: Program, plan: HalfPlan, halves: Collection[fx.Node]) -> int:
    """Write the casts around these nodes in place; return how many there are."""
    return write_casts(program, halves, getattr(torch, plan.dtype), masks=plan.policy == "measured")


def lower_half(program: Program, *, integers: Literal["half", "float32"]) -> Program:
    """Return a program whose quantization plan has a half plan beside it with the casts of that in the graph.

    The quantization plan stays, by the same node names. Any other program is returned as it is.

    Args:
        integers: The float type that the runtime's integer kernels read and write at their borders: the 16-bit one
            (TensorRT), or float32 (ONNX Runtime on CPU), with casts around them.
    """
    plan = program.quantization
    if plan is None or plan.half is None:
        return program
    lowered = program.clone()
    write_half(lowered, plan.half, in_half(lowered, plan.half, plan.layers if integers == "float32" else ()))
    lowered.quantization = dataclasses.replace(plan, half=None)
    lowered.refresh()
    return lowered


def holds_half(program: Program) -> bool:
    """Say whether a value of the graph is in a 16-bit float type."""
    values = (tensor_value(node) for node in program.graph.nodes)
    return any(value is not None and value.dtype in (torch.float16, torch.bfloat16) for value in values)


def refuse_mixed(program: Program, runtime: str) -> None:
    """Refuse a program in INT8 and half at once, for runtimes that have no such form.

    Raises:
        Refused: It is one.
    """
    plan = program.quantization
    if plan is not None and plan.half is not None:
        raise Refused(
            f"{runtime} has no INT8 mixed with {plan.half.dtype}.",
            hint="Use --int8 alone for this target, or --to tensorrt, onnx (float16) or openvino (bfloat16).",
        )
