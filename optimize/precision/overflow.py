"""Find the calls whose values leave the range of a 16-bit type, by running them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from optimize import graph, ops
from optimize.precision.emulation import Emulation, Values

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
            for source in set(call.all_input_nodes) & set(halves):
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
