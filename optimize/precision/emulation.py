"""Run a graph in float32 beside itself with 16-bit values, both computed in float32.

A call in half reads rounded values, computes in float32 and rounds its result: what kernels with wide accumulators do,
on any machine, at the speed of float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize import graph, ops
from optimize.distances import output_error
from optimize.errors import Refused, VerificationFailed, first_line
from optimize.precision.casting import is_mask, narrow_call, narrowed
from optimize.precision.policies import PRODUCTS
from optimize.program import Program

Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class Emulation:
    """Evaluates the nodes of a program one by one, each in float32 or as in a 16-bit type.

    Attributes:
        program: In float32.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """

    program: Program
    dtype: torch.dtype
    _weights: Values = field(default_factory=dict, init=False, repr=False)
    _narrow: dict[fx.Node, Any] = field(default_factory=dict, init=False, repr=False)

    def start(self, flat: Sequence[torch.Tensor]) -> Values:
        """Return the values of inputs and weights."""
        nodes = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        weights = [node for node in self.program.graph.nodes if node.op == "get_attr"]
        held = {node: graph.attribute(self.program.graph_module, str(node.target)) for node in weights}
        return {**dict(zip(nodes, flat, strict=True)), **held}

    @property
    def calls(self) -> list[fx.Node]:
        """The calls, in execution order."""
        return [node for node in self.program.graph.nodes if node.op == "call_function"]

    def value(self, call: fx.Node, values: Mapping[fx.Node, Any], *, half: bool) -> Any:
        """Return what a call gives for the values it reads, in float32 or as in half.

        Raises:
            Refused: It does not take them rounded, such as an index that is then beyond its table.
        """
        if not half:
            return self._computed(call, *fx.node.map_arg((call.args, call.kwargs), values.__getitem__))
        if call not in self._narrow:
            args, kwargs = narrow_call(call, self.dtype, masks=True)
            # It computes in float32 here whatever dtype it names.
            self._narrow[call] = fx.node.map_aggregate(
                (args, kwargs), lambda each: torch.float32 if each is self.dtype else each
            )
        args, kwargs = fx.node.map_arg(self._narrow[call], lambda source: self._read(source, values))
        return pytree.tree_map(self._round, self._computed(call, args, kwargs))

    def _computed(self, call: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return call.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError) as error:
            what = f"'{graph.origin(call)}' cannot be computed from rounded values: {first_line(error)}"
            raise Refused(what, hint="Keep what it is computed from in float32 (--keep).") from error

    def outputs(self, flat: Sequence[torch.Tensor], halves: Collection[fx.Node]) -> tuple[torch.Tensor, ...]:
        """Return the flat outputs with these calls in half."""
        values = self.start(flat)
        for call in self.calls:
            values[call] = self.value(call, values, half=call in halves)
        return tuple(values[node] for node in self.program.outputs)

    def _round(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
            return value.to(self.dtype).float()
        return value

    def _read(self, source: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Return a value as half reads it; weights are rounded once."""
        if source.op != "get_attr":
            return self._round(values[source])
        if source not in self._weights:
            held = values[source]
            is_float = held.dtype is torch.float32
            self._weights[source] = narrowed(held, self.dtype, masks=is_mask(source)).float() if is_float else held
        return self._weights[source]


def find_missing(emulation: Emulation, flat: Sequence[torch.Tensor], calls: Collection[fx.Node]) -> dict[fx.Node, str]:
    """Return the calls that torch cannot compute in the 16-bit type, with the reason; each operator is tried once.

    Products have kernels; Fourier transforms, most of linear algebra and some poolings have none. Complex numbers are
    made of float32 and become float32: their halves have next to no kernels.
    """
    found: dict[fx.Node, str] = {}
    tried: dict[tuple[Any, ...], str] = {}
    values = emulation.start(flat)
    with torch.inference_mode():
        for call in emulation.calls:
            values[call] = emulation.value(call, values, half=False)
            kind = (call.target, *(value.dim() for value in _tensors(values[call])))
            if call not in calls:
                continue
            if _is_complex(call, values):
                found[call] = "complex numbers are made of float32"
                continue
            if kind not in tried:
                tried[kind] = "" if graph.op_name(call) in PRODUCTS else _missing(emulation, call, values)
            if tried[kind]:
                found[call] = tried[kind]
    return found


def _is_complex(call: fx.Node, values: Values) -> bool:
    parts = [part for node in (call, *call.all_input_nodes) for part in pytree.tree_leaves(values[node])]
    return any(isinstance(part, torch.Tensor) and part.is_complex() for part in parts)


def _missing(emulation: Emulation, call: fx.Node, values: Values) -> str:
    """Say what keeps a call from the 16-bit type, if something does: it is computed in it, once."""
    name = str(emulation.dtype).removeprefix("torch.")

    def narrow(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(emulation.dtype) if is_float else value

    args, kwargs = fx.node.map_arg(
        narrow_call(call, emulation.dtype, masks=True), lambda node: pytree.tree_map(narrow, values[node])
    )
    try:
        made = call.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError):
        return f"torch has no {name} kernel of it"
    return f"torch computes it in float32 for {name}" if _tensors(made) else ""


#: What calibration data reaches, other data may exceed by this factor.
HEADROOM = 2.0
#: Square the distance to the mean; some runtimes do that in half.
_SQUARING = frozenset({
    "layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "rms_norm", "instance_norm", "var", "std",
    "var_mean", "std_mean", "norm", "linalg_vector_norm",
})  # fmt: skip
_CENTRED_NOT = frozenset({"rms_norm", "norm", "linalg_vector_norm"})


def find_overflows(
    emulation: Emulation, batches: Iterable[Sequence[torch.Tensor]], halves: Collection[fx.Node]
) -> dict[fx.Node, str]:
    """Return the calls among ``halves`` that must be in float32 for all to stay finite, with the reason.

    A call that overflows is computed in float32 from then on. One that is wrong in float32 as well, because a value it
    reads became zero or infinite in half (a small divisor), takes the calls that made its inputs with it; the batch is
    run again until nothing more is found.
    """
    found: dict[fx.Node, str] = {}
    with torch.inference_mode():
        for flat in batches:
            while new := _scan(emulation, flat, set(halves) - found.keys()):
                found.update(new)
    return found


def _scan(emulation: Emulation, flat: Sequence[torch.Tensor], halves: Collection[fx.Node]) -> dict[fx.Node, str]:
    """Return the calls that overflow in one batch; each is followed by its float32 value."""
    limit = torch.finfo(emulation.dtype).max
    found: dict[fx.Node, str] = {}
    wanted, got = emulation.start(flat), emulation.start(flat)
    for call in emulation.calls:
        half = call in halves
        wanted[call] = emulation.value(call, wanted, half=False)
        got[call] = emulation.value(call, got, half=half)
        lost = any(map(_lost, _tensors(wanted[call]), _tensors(got[call])))
        if half and (reason := _reason(call, wanted, got, limit, lost=lost)):
            found[call] = reason
        if lost and any(map(_lost, _tensors(wanted[call]), _tensors(emulation.value(call, got, half=False)))):
            for source in filter(halves.__contains__, call.all_input_nodes):
                found.setdefault(source, f"{graph.op_name(call)} behind it is not finite for what half makes of it")
        if lost or call in found:
            got[call] = wanted[call]
    return found


def _reason(call: fx.Node, wanted: Values, got: Values, limit: float, *, lost: bool) -> str | None:
    """Say why a call cannot be in half, if so."""
    reached = max(map(_magnitude, _tensors(wanted[call])), default=0.0)
    held = max(map(_magnitude, _tensors(got[call])), default=0.0)
    if lost or held * HEADROOM > limit:
        reached = max(reached, *(_magnitude(wanted[source]) for source in _sources(call, wanted)))
        if reached * HEADROOM > limit:
            return f"its values reach {reached:.3g}, beyond {limit:.3g} with a headroom of {HEADROOM:g}"
        return "it is not finite in half for the values it reads"
    squares = _largest_square(call, wanted)
    if squares > limit:
        return f"the squares inside it reach {squares:.3g}, beyond {limit:.3g}"
    sums = _largest_sum(call, wanted)
    return f"the sums inside it reach {sums:.3g}, beyond {limit:.3g}" if sums > limit else None


def _sources(call: fx.Node, values: Values) -> list[fx.Node]:
    return [source for source in call.all_input_nodes if isinstance(values[source], torch.Tensor)] or [call]


def _largest_square(call: fx.Node, values: Values) -> float:
    """Return the largest squared distance from the mean that a normalisation computes; 0 for other calls."""
    name = graph.op_name(call)
    if name not in _SQUARING:
        return 0.0
    value = values[call.all_input_nodes[0]]
    centre = 0.0 if name in _CENTRED_NOT else float(value.mean())
    return _magnitude(value - centre) ** 2


def _largest_sum(call: fx.Node, values: Values) -> float:
    """Return the largest sum that an average divides, which ONNX Runtime's GPU kernels keep in half; 0 for others."""
    if not graph.is_call(call, *ops.AVERAGES, *ops.AVERAGE_POOLS):
        return 0.0
    source, mean = values[call.all_input_nodes[0]], values[call]
    if call.target in ops.AVERAGE_POOLS:
        window = graph.argument(call, "kernel_size")
        count = math.prod(window if len(window) > 1 else window * ops.SPATIAL_AXES[call.target])
    else:
        count = source.numel() // max(mean.numel(), 1)
    return _magnitude(mean) * count


def _tensors(value: object) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple | list) else (value,)
    return [part for part in parts if isinstance(part, torch.Tensor) and part.dtype is torch.float32]


def _magnitude(value: object) -> float:
    """Return the largest finite magnitude of a float tensor; 0 where it has none."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0.0
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _lost(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    """Say whether a value that was finite is not, or one that was a number is NaN."""
    return bool(((wanted.isfinite() & ~got.isfinite()) | (got.isnan() & ~wanted.isnan())).any())


Batches = Iterable[Sequence[torch.Tensor]]


def worst_error(emulation: Emulation, batches: Batches, halves: Collection[fx.Node]) -> float:
    """Return the largest error of an output divided by its largest magnitude, with these calls in half."""
    worst = 0.0
    with torch.inference_mode():
        for flat in batches:
            wanted, got = emulation.outputs(flat, ()), emulation.outputs(flat, halves)
            worst = max([worst, *map(_relative, wanted, got)])
    return worst


def find_losses(
    emulation: Emulation, batches: Sequence[Sequence[torch.Tensor]], halves: Collection[fx.Node], allowed: float
) -> tuple[dict[fx.Node, str], float]:
    """Return the calls to keep in float32 so that the outputs err by at most ``allowed``, and the error that is left.

    Calls are ordered by the error that each causes alone, on the first batch. One is worth keeping where that is more
    than all together may cause. Errors of many calls add up like independent noise: those kept first leave less than
    ``allowed`` by that rule, and their number grows by half until the error of all together says so too. Where no call
    stands out, none is to blame, and more error than allowed is left.
    """
    error = worst_error(emulation, batches, halves)
    if error <= allowed:
        return {}, error
    errors = _errors_alone(emulation, batches[0], halves)
    ranked = sorted((call for call in errors if errors[call] > allowed), key=lambda call: -errors[call])
    count = min(_least(sorted(errors.values(), reverse=True), allowed), len(ranked))
    error = worst_error(emulation, batches, set(halves) - set(ranked[:count]))
    while error > allowed and count < len(ranked):
        count = min(count + max(1, count // 2), len(ranked))
        error = worst_error(emulation, batches, set(halves) - set(ranked[:count]))
    reasons = {call: f"its rounding alone moves the outputs by {errors[call]:.1e} of the largest" for call in ranked}
    return {call: reasons[call] for call in ranked[:count]}, error


def _least(errors: Sequence[float], allowed: float) -> int:
    """Return how many of the largest errors must go until the root of the rest's squares is at most ``allowed``.

    >>> _least([3.0, 1.0, 1.0], 1.5)
    1
    """
    counts = range(1, len(errors))
    return next((count for count in counts if math.hypot(*errors[count:]) <= allowed), len(errors))


def _errors_alone(
    emulation: Emulation, flat: Sequence[torch.Tensor], halves: Collection[fx.Node]
) -> dict[fx.Node, float]:
    """Return the output error of each call in half while all others are in float32."""
    with torch.inference_mode():
        reference = emulation.start(flat)
        for call in emulation.calls:
            reference[call] = emulation.value(call, reference, half=False)
        return {call: _error_alone(emulation, reference, call) for call in emulation.calls if call in halves}


def _error_alone(emulation: Emulation, reference: Values, alone: fx.Node) -> float:
    """Return the output error of one call in half; only what depends on it is computed again."""
    changed: Values = {alone: emulation.value(alone, reference, half=True)}
    for call in emulation.calls:
        if any(source in changed for source in call.all_input_nodes) and call is not alone:
            values = {source: changed.get(source, reference[source]) for source in call.all_input_nodes}
            changed[call] = emulation.value(call, values, half=False)
    outputs = [node for node in emulation.program.outputs if node in changed]
    return max((_relative(reference[node], changed[node]) for node in outputs), default=0.0)


def _relative(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude; infinite where a number is lost."""
    if not wanted.is_floating_point():
        return 0.0
    try:
        error, scale = output_error(wanted, got)
    except VerificationFailed:
        return math.inf
    return error / scale
