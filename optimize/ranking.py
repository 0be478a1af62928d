"""Which layers to give back to float first, from their errors and times: plain arithmetic, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from optimize import wording as form
from optimize.costs import NodeCost
from optimize.measure.layer_times import LayerTime
from optimize.quantization.sensitivity import LayerError

#: A layer that saves less counts as saving this much: shorter times are not told apart.
LEAST_SAVED_S = 1e-6


def rank(errors: Sequence[LayerError], times: Mapping[str, LayerTime], costs: Mapping[str, NodeCost]) -> list[str]:
    """Return the names of the layers, best error removed per second first; per work where a time is missing.

    Args:
        errors: Of each layer.
        times: Of each layer by node name; empty where the target's runtime does not tell them.
        costs: Work of each layer by node name.
    """
    timed = all(error.name in times for error in errors)

    def price(error: LayerError) -> float:
        return max(times[error.name].saved_s, LEAST_SAVED_S) if timed else costs[error.name].work

    return [error.name for error in sorted(errors, key=lambda error: error.noise / price(error), reverse=True)]


def shares(errors: Sequence[LayerError]) -> dict[str, float]:
    """Return each layer's share of the error of all, by node name."""
    total = sum(error.noise for error in errors) or 1.0
    return {error.name: error.noise / total for error in errors}


def explain(errors: Sequence[LayerError], times: Mapping[str, LayerTime], option: str) -> dict[str, str]:
    """Return why each layer would be given back, by node name, as a sentence without a full stop."""
    reasons = {}
    for name, share in shares(errors).items():
        reasons[name] = f"given back to meet {option}: removes {100 * share:.2g} % of the error{_cost(times.get(name))}"
    return reasons


def _cost(time: LayerTime | None) -> str:
    """Return what a layer in float costs, as the end of a sentence; nothing where that is not known."""
    if time is None:
        return ""
    return " at no cost in time" if time.saved_s <= 0 else f" for {form.seconds(time.saved_s)}"


def fewest(most: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest count from 1 to ``most`` that holds, where more never hold worse; None when none does.

    Doubles until one holds, then bisects.

    >>> fewest(20, lambda count: count >= 11), fewest(20, lambda count: False)
    (11, None)
    """
    below, count = 0, min(1, most)
    while not (count and holds(count)):
        if count >= most:
            return None
        below, count = count, min(2 * count, most)
    while count - below > 1:
        middle = (below + count) // 2
        below, count = (below, middle) if holds(middle) else (middle, count)
    return count


def slow_choices(times: Mapping[str, LayerTime]) -> list[list[str]]:
    """Return sets of layers that may be faster in float: the neighbours that lose most, the two such groups, all.

    Between a layer in float and one in INT8 stands a conversion, which costs less for neighbours together; what it
    costs is not known before a file is timed.

    Args:
        times: Of each layer by node name, in execution order.
    """
    groups: list[list[str]] = []
    adjacent = False
    for name, time in times.items():
        if time.is_slower and adjacent:
            groups[-1].append(name)
        elif time.is_slower:
            groups.append([name])
        adjacent = time.is_slower
    groups.sort(key=lambda group: sum(times[name].saved_s for name in group))
    choices = [[name for group in groups[:count] for name in group] for count in (1, 2, len(groups))]
    return [choice for index, choice in enumerate(choices) if choice and choice not in choices[:index]]
