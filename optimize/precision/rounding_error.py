"""Find the calls whose rounding the outputs notice, and keep as few of them in float32 as the outputs allow."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from optimize.distances import output_error
from optimize.errors import VerificationFailed
from optimize.precision.emulation import Emulation, Values

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
