"""Passes by what a user asks for in a word: what ``--fuse`` and ``--int8`` stand for, as a recipe writes them."""

from __future__ import annotations

from typing import Any

from optimize.processor import adds_pairs, named
from optimize.registry import find_pass

#: What INT8 may cost to make, from seconds to minutes.
EFFORTS = ("quick", "default", "best")


def fusing(*, fuse: bool, reparameterize: bool) -> list[dict[str, Any]]:
    """Return the exact passes in order.

    A BatchNorm in front of a sign becomes thresholds before another pass can fold it; one inside a branch is merged
    with its branch; what is left goes into the layer beside it. Tokens that nobody reads go last.
    """
    return chosen(
        (fuse, "FuseBNSign", {}),
        (reparameterize, "Reparameterize", {}),
        (fuse, "FuseConvBN", {}),
        (fuse, "SelectEarly", {}),
    )


def quantizing(effort: str = "default", cpu: str = "any", bits: float = 8) -> list[dict[str, Any]]:
    """Return the passes of static INT8 in order; ``benchmarks/results/making.md`` has what each effort takes and gives.

    ``quick`` weighs ranges by the error of their own values, in place of what it does further on, and leaves channels
    and every layer as they are; ``best`` shifts and scales channels in every way that held-out samples gain by. Fewer
    than 8 ``bits`` are what weights are stored in on average.

    >>> [entry["name"] for entry in quantizing("quick", cpu="vnni")]
    ['QuantizeStatic']
    """
    quick, best, few = effort == "quick", effort == "best", {"bits": bits} if bits < 8 else {}
    return chosen(
        (best, "AbsorbBias", {}),
        (not quick, "EqualizeChannels", {} if best else {"unless_near": True}),
        (not quick, "SmoothActivations", {} if best else {"unless_near": True}),
        (adds_pairs(named(cpu)), "PairChannels", {}),
        (True, "QuantizeStatic", {"calibrator": "mse", "spare": 0.0, **few} if quick else few),
    )


def quantizing_at_run_time(*, data: bool) -> list[dict[str, Any]]:
    """Return the passes of dynamic INT8 in order: with data, wide channels are made narrower first.

    A range for a whole batch has 256 integers, of which the widest channels of an encoder leave few to the others.
    """
    return chosen((data, "SmoothActivations", {"unless_near": True}), (True, "QuantizeDynamic", {}))


def ordered(entries: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return passes with others among them, each behind the last of those that come no later by what they declare.

    That is the stage; then on the graph the promise, exact ones first; then whether they prepare for a precision pass.

    >>> made = [{"name": "FuseConvBN"}, {"name": "QuantizeStatic"}]
    >>> [entry["name"] for entry in ordered(made, [{"name": "CastFP16"}, {"name": "Reparameterize"}])]
    ['FuseConvBN', 'Reparameterize', 'QuantizeStatic', 'CastFP16']
    """
    found = list(entries)
    for entry in own:
        *places, place = (find_pass(other["name"]).place() for other in (*found, entry))
        found.insert(max((at for at, other in enumerate(places, 1) if other <= place), default=0), entry)
    return found


def chosen(*asked: tuple[Any, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those passes that are wanted, as a recipe writes them."""
    return [{"name": name, "options": values} for wanted, name, values in asked if wanted]
