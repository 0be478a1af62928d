"""Half precision: casts written into the graph, with what must stay in float32 left there."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import fx

from optimize import graph, ops
from optimize.data import Given
from optimize.errors import Refused, UsageError
from optimize.passes.base import Exactness, Outcome, PrecisionPass, Rewrite, Skip
from optimize.plan import HalfPlan, Policy
from optimize.precision.casting import is_concerned, makes_float32
from optimize.precision.emulation import Emulation, find_losses, find_missing, find_overflows
from optimize.precision.lowering import holds_half, in_half, write_half
from optimize.precision.policies import APEX_BANNED, APEX_HALF, NORMS, PRODUCTS, apex_name, keeps_float32
from optimize.program import Program
from optimize.quantization.batches import FlatBatches, require_batches
from optimize.quantization.rounding import Rounding, check_rounding
from optimize.quantization.weights import SAMPLES as ROUNDING_SAMPLES
from optimize.quantization.weights import restore, round_to_half
from optimize.registry import register_pass

#: Samples that decide what stays in float32.
SAMPLES = 16
_BY_STEP = "its state would be rounded at every step"
_UNFOLDED = "a BatchNorm keeps its statistics in float32; FuseConvBN folds one that follows a convolution"
_BANNED = "Sigmoid and binary cross entropy are one operator in float32: use BCEWithLogitsLoss, or policy O2."
Kept = dict[fx.Node, str]


@dataclass(frozen=True)
class _CastHalf(PrecisionPass):
    """Cast a program to a 16-bit float type, keeping float32 where 16 bits do not hold the values.

    Attributes:
        calibration: Batches of inputs that show what needs float32; without any, the operator's name and the example
            inputs decide.
        policy: ``measured``, or a level of Apex: ``O0`` nothing, ``O1`` its lists, ``O2`` all but BatchNorm and
            reductions, ``O3`` everything.
        io: Type of the program's inputs and outputs: ``float32``, or ``half`` for the 16-bit type.
        rounding: ``compensated`` rounds weights so that the layers' outputs on the calibration data move least, and
            takes the mean of what is left out of the bias; ``nearest``, and policies of Apex, each weight by itself.
        mixed: In a run, cast what the INT8 variant before it leaves in float, instead of the float variant. The graph
            stays in float32 and the quantization plan carries the rest (``HalfPlan``), for targets to lower.
    """

    exactness: ClassVar[Exactness] = Exactness.ROUNDING
    dtype: ClassVar[torch.dtype]
    #: Largest error of an output over its largest magnitude that measuring allows.
    allowed: ClassVar[float]
    #: What to say about machines that this type is slow on.
    advice: ClassVar[tuple[str, ...]] = ()

    calibration: Given | None = field(default=None, repr=False, compare=False)
    policy: Policy = "measured"
    io: Literal["float32", "half"] = "float32"
    rounding: Rounding = "compensated"
    mixed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in get_args(Policy):
            raise UsageError(f"There is no policy '{self.policy}'.", hint=f"One of {get_args(Policy)}.")
        if self.io not in ("float32", "half"):
            raise UsageError(f"io='{self.io}': inputs and outputs are 'float32' or 'half'.")
        check_rounding(self.rounding)
        if self.calibration is not None:
            require_batches(self.calibration)

    @property
    def continues(self) -> bool:
        """Whether it goes on from the INT8 variant before it."""
        return self.mixed

    def rewrite(self, program: Program) -> Outcome:
        """Assign a precision to every call, then write the casts between them."""
        if message := self._nothing_to_do(program):
            return Outcome(notes=(message,))
        before = self._rounded(program)
        concerned = [node for node in program.graph.nodes if is_concerned(node)]
        calls = [node for node in concerned if node.op == "call_function"]
        integers = {node: "it makes float32 of integers" for node in calls if makes_float32(node)}
        asked = self.kept(program)
        missing = find_missing(Emulation(program, self.dtype), program.inputs, set(calls) - integers.keys())
        asked = integers | missing | {node: asked[node] for node in calls if node in asked}
        kept, notes = self._kept(program, [node for node in calls if node not in asked])
        kept = asked | kept
        plan = self._plan(concerned, kept)
        halves = in_half(program, plan)
        computing = [node for node in calls if node in halves]
        if before is not None:
            restore(program, _names(node for node in calls if node not in halves) - _in_integers(program), before)
        skips = tuple(Skip(graph.origin(node), graph.op_name(node), kept[node]) for node in calls if node in kept)
        if not computing:
            return Outcome(skips=skips, notes=notes)
        notes = (self._summary(len(computing), len(kept)), *notes, *self.advice)
        rewrites = tuple(self._rewritten(program, computing))
        if program.quantization is not None:
            program.quantization = replace(program.quantization, half=plan)
            return Outcome(rewrites, skips, notes)
        casts = write_half(program, plan, halves)
        spared = len(calls) - len(computing) - len(kept)
        floats = f"{casts} casts, {spared} more calls in float32 to have no more of them."
        return Outcome(rewrites, skips, (notes[0], floats, *notes[1:]))

    def _nothing_to_do(self, program: Program) -> str:
        """Say why there is nothing to cast, if so.

        Raises:
            Refused: The program is quantized in a way that halves do not go with, or not at all though they should.
        """
        plan = program.quantization
        if plan is not None and plan.mode != "static":
            raise Refused(f"{self.name} cannot follow {plan.precision}: it goes with static INT8 alone.")
        if plan is None and self.mixed:
            raise Refused(f"{self.name}(mixed=True) found no INT8 to mix with.", hint="Put QuantizeStatic before it.")
        if holds_half(program) or (plan is not None and plan.half is not None):
            return "The program holds 16-bit values already."
        return "O0 casts nothing." if self.policy == "O0" else ""

    def _rewritten(self, program: Program, computing: Sequence[fx.Node]) -> Iterator[Rewrite]:
        """Yield the products that are cast, else every call; those in integers are not."""
        layers = _in_integers(program)
        beside = [node for node in computing if node.name not in layers]
        products = [node for node in beside if graph.op_name(node) in PRODUCTS]
        for node in products or beside or computing:
            yield Rewrite(graph.origin(node), f"{graph.op_name(node)} to {self._short}")

    def _rounded(self, program: Program) -> Program | None:
        """Round the weights with the user's data in view, if there are any; return the program as it was."""
        data = self._batches(program) if self.policy == "measured" and self.rounding == "compensated" else None
        return None if data is None else round_to_half(program, data.first(ROUNDING_SAMPLES), self.dtype)

    def _kept(self, program: Program, calls: Sequence[fx.Node]) -> tuple[Kept, tuple[str, ...]]:
        """Return the calls that must be in float32 with the reason, and what the report should say."""
        data = self._batches(program) if self.policy == "measured" else None
        if data is not None and (samples := list(data.singles(SAMPLES))):
            return self._measured(program, samples, calls)
        banned = next((node for node in calls if apex_name(graph.op_name(node)) in APEX_BANNED), None)
        if self.policy == "O1" and banned is not None:
            raise Refused(f"'{graph.origin(banned)}' is a {graph.op_name(banned)}: O1 bans it.", hint=_BANNED)
        named = [node for node in calls if keeps_float32(self.policy, graph.op_name(node))]
        kept = {node: self._by_name(node) for node in named}
        if self.policy != "measured":
            return kept, ()
        emulation = Emulation(program, self.dtype)
        return kept | find_overflows(emulation, [program.inputs], set(calls) - kept.keys()), ()

    def _measured(
        self, program: Program, batches: Sequence[Sequence[torch.Tensor]], calls: Sequence[fx.Node]
    ) -> tuple[Kept, tuple[str, ...]]:
        """Return what overflows and what the outputs notice."""
        emulation = Emulation(program, self.dtype)
        kept = {node: _BY_STEP for node in calls if graph.is_call(node, *ops.RECURRENT)}
        kept |= {node: _UNFOLDED for node in calls if graph.op_name(node) in NORMS}
        kept |= find_overflows(emulation, batches, set(calls) - kept.keys())
        integer = _in_integers(program)
        halves = {node for node in calls if node not in kept and node.name not in integer}
        losses, error = find_losses(emulation, batches, halves, self.allowed)
        note = f"On the calibration data the outputs move by {error:.1e} of the largest."
        if error > self.allowed:
            note = f"{note[:-1]}: no call stands out, {self._short} costs that much here."
        return kept | losses, (note,)

    def _batches(self, program: Program) -> FlatBatches | None:
        """Return the user's own samples, if there are any."""
        found = None if self.calibration is None else FlatBatches(program, self.calibration)
        return None if found is None or found.samples.synthetic else found

    def _plan(self, concerned: Sequence[fx.Node], kept: Mapping[fx.Node, str]) -> HalfPlan:
        """Return what must be in half and what must not."""
        ends = {node for node in concerned if node.op != "call_function"}
        free = {node for node in concerned if node.target is operator.getitem} | ends | kept.keys()
        products = APEX_HALF if self.policy == "O1" else PRODUCTS
        named = {node for node in concerned if node not in free and graph.op_name(node) in products}
        halves = named if self.policy in ("measured", "O1") else set(concerned) - free
        floats, halves = (kept.keys() | ends, halves) if self.io == "float32" else (set(kept), halves | ends)
        return HalfPlan(self._short, _names(halves), _names(floats), self.policy)

    def _by_name(self, node: fx.Node) -> str:
        name = graph.op_name(node)
        return (
            f"{name} loses precision in {self._short}" if self.policy == "measured" else f"{self.policy} keeps {name}"
        )

    def _summary(self, halves: int, kept: int) -> str:
        ends = "stay float32" if self.io == "float32" else f"are {self._short}"
        return f"{halves} calls in {self._short}, {kept} kept in float32; inputs and outputs {ends}."

    @property
    def _short(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@register_pass
@dataclass(frozen=True)
class CastFP16(_CastHalf):
    """Cast to float16 with explicit casts in the graph, keeping in float32 what would overflow or lose precision.

    With calibration data, float32 runs beside float16. What stays in float32, each call with its figure: values that
    come within a factor of 2 of float16's range (65504), divisors that float16 makes zero, and the fewest calls whose
    rounding must go for the outputs to err by less than ``allowed``; recurrent layers and BatchNorm always. Without
    data: exponentials, logarithms, normalisations, long sums, recurrent layers, and what leaves the range on the
    example inputs. Casts are placed where they are fewest. Run it after ``FuseConvBN``: values before a BatchNorm are
    often too large.

    ``policy`` names a level of Apex instead; those look at no values, so that ``O3`` is wrong where values overflow.

    What it costs: half the file. Float16 is slow on CPUs (measured 40x slower than float32 in eager PyTorch): meant
    for GPUs.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(8, 4).eval(), (torch.rand(2, 8),))
        >>> program, outcome = CastFP16().apply(program)
        >>> program.graph_module.get_parameter("weight").dtype
        torch.float16

    Source: P. Micikevicius et al., "Mixed Precision Training", 2017, arXiv 1710.03740.
    """

    tolerance: ClassVar[float] = 5e-3
    remedy: ClassVar[str] = "For less: calibration data (--calib) shows what must stay in float32, or cast to bfloat16."
    dtype: ClassVar[torch.dtype] = torch.float16
    allowed: ClassVar[float] = 2e-3
    advice: ClassVar[tuple[str, ...]] = (
        "float16 is for GPUs: eager PyTorch on a CPU is up to 40 times slower with it. For CPUs cast to bfloat16.",
    )


@register_pass
@dataclass(frozen=True)
class CastBF16(_CastHalf):
    """Cast to bfloat16 with explicit casts in the graph, keeping in float32 what would lose precision.

    The same rules as ``CastFP16``; bfloat16 has float32's range, so nothing overflows, and 8 bits of precision.

    What it costs: half the file; fast on CPUs with AVX512-BF16 or AMX and on GPUs.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(8, 4).eval(), (torch.rand(2, 8),))
        >>> program, outcome = CastBF16().apply(program)
        >>> outcome.notes[0]
        '1 calls in bfloat16, 0 kept in float32; inputs and outputs stay float32.'

    Source: D. Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019, arXiv 1905.12322.
    """

    tolerance: ClassVar[float] = 4e-2
    remedy: ClassVar[str] = (
        "For less: calibration data (--calib) shows what must stay in float32; --half-policy O1 keeps more there; "
        "float16 (--fp16) and often INT8 (--int8) are more accurate."
    )
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    allowed: ClassVar[float] = 2e-2


def _names(nodes: Iterable[fx.Node]) -> frozenset[str]:
    return frozenset(node.name for node in nodes)


def _in_integers(program: Program) -> frozenset[str]:
    """Return the names of the layers that a quantization plan runs in integers."""
    return program.quantization.layers if program.quantization else frozenset()
