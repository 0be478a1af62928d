"""The one layer that comes nearest to several: least squares of what they give on calibration data.

A segment of a network gives ``y`` for columns ``x`` (the pixels under a kernel). The best affine layer in its place is
``y - Px = A (x - mean(x)) + mean(y - Px)`` with ``A`` the covariances' ``C_yx C_xx^-1``, damped as one half of the data
says of the other; ``P`` picks the pixel in the middle where widths agree, so that what data does not speak of passes
as it is. Nothing is trained.

Source: H. Fu et al., "DepthShrinker", 2022, arXiv 2206.00843, and J. Kim, M. El Halabi, M. Ji, H. O. Song,
"LayerMerge", 2024, arXiv 2406.12837, take activations away and multiply what is left; D. Shopkhoev et al.,
"ReplaceMe", 2025, arXiv 2505.02819, fits one matrix to several transformer blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from optimize import graph
from optimize.algebra.affine import Affine, Kernel
from optimize.algebra.emit import emit
from optimize.merged import STANDS_FOR, Merged
from optimize.program import Program
from optimize.pruning.compensation import Columns, choose_damping, no_samples
from optimize.pruning.segments import Form, Segment
from optimize.quantization.batches import Flat, samples_of
from optimize.quantization.calibrate import observe
from optimize.quantization.rounding import InputMoments, grid_points, patches, positions

#: Numbers that the covariances of all segments together may have, of one half of the data.
_MOST_NUMBERS = 2**26
#: Steps that a budget is counted in.
_STEPS = 400

Choice = tuple[Segment, Form]
#: The weight ``[C_out, K]`` and bias ``[C_out]`` of a layer in place of a segment, float64; None for nothing.
Fitted = tuple[torch.Tensor, torch.Tensor] | None


@dataclass
class _Sums:
    """What is known of the columns that one value gives with one kernel, and of what segments give for them."""

    form: Form
    targets: list[tuple[str, int]]
    moments: InputMoments

    @classmethod
    def of(cls, form: Form, targets: Collection[tuple[str, int]]) -> _Sums:
        length = form.row + sum(width for _, width in targets)
        zeros = torch.zeros(1, length, dtype=torch.float64)
        return cls(form, list(targets), InputMoments(zeros, zeros.new_zeros(1, length, length), torch.zeros(1, length)))

    def update(self, source: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        most, targets = positions(self.form.row), [made[name] for name, _ in self.targets]
        if self.form.op == "linear":
            rows = [value.reshape(-1, value.shape[-1]) for value in (source, *targets)]
            every = max(1, len(rows[0]) // (most * len(source)))
            columns = torch.cat([each[::every] for each in rows], 1).T
        else:
            kernel = (self.form.kernel,) * 2
            seen = patches(source, kernel, self.form.stride, [side // 2 for side in kernel], (1, 1))
            index: Any = (slice(None), slice(None), *grid_points(targets[0].shape[2:], most))
            taken = [seen[index].movedim(2, -1).flatten(1, 3), *(value[index] for value in targets)]
            columns = torch.cat([each.movedim(1, 0).flatten(1) for each in taken])
        self.moments.update(columns[None].float())

    def columns(self, samples: int) -> dict[str, Columns]:
        """Return what there is to know of the columns and of each segment's answers less what passes."""
        whole, length, found = Columns.of(self.moments, samples), self.form.row, dict[str, Columns]()
        start = length
        for name, width in self.targets:
            chosen = torch.tensor([*range(length), *range(start, start + width)])
            mean, covariance = whole.mean[chosen], whole.covariance[chosen][:, chosen]
            if passes(self.form, width):
                middle = torch.arange(width) * self.form.kernel**2 + self.form.kernel**2 // 2
                mean[length:] -= mean[middle]
                covariance[length:] -= covariance[middle]
                covariance[:, length:] -= covariance[:, middle]
            found[name], start = replace(whole, mean=mean, covariance=covariance), start + width
        return found


def passes(form: Form, outputs: int) -> bool:
    """Say whether what data does not speak of passes as it is: where widths and sizes agree."""
    return form.inputs == outputs and form.stride == (1, 1)


def fit(
    now: Program, then: Program, choices: Sequence[Choice], folds: Sequence[Sequence[Flat]], names: Mapping[str, str]
) -> dict[Choice, Fitted]:
    """Return the layer of each choice that comes nearest on the data; some are left out where memory is short.

    Args:
        now: What layers are to go into: they read its values.
        then: What they are to come near to.
        choices: Parts of ``then`` and their forms.
        folds: Batches of one half of the data and of the other, which may be empty.
        names: Of values in ``now``, where they are others than in ``then``.

    Raises:
        Refused: The data has no samples, or none of finite numbers.
    """
    found: dict[Choice, Fitted] = {choice: None for choice in choices if choice[1].op == "none"}
    together: dict[tuple[str, Form], dict[tuple[str, int], Choice]] = defaultdict(dict)
    numbers = 0
    for segment, form in sorted(choices, key=lambda choice: choice[1].macs - choice[0].macs):
        if form.op != "none" and (numbers := numbers + (form.row + form.outputs) ** 2) <= _MOST_NUMBERS:
            alike = replace(form, outputs=0, macs=0)
            together[segment.source, alike][segment.target, form.outputs] = (segment, form)
    halves = []
    for fold in filter(None, folds):
        sums = {key: _Sums.of(key[1], targets) for key, targets in together.items()}
        halves.append((sums, _see(now, then, sums, fold, names)))
    if not halves or not all(each.moments.count for sums, _ in halves for each in sums.values()):
        raise no_samples()
    for key, targets in together.items():
        seen = [sums[key].columns(samples) for sums, samples in halves]
        for (target, _), (segment, form) in targets.items():
            found[segment, form] = _solve(form, [half[target] for half in seen])
    return found


def _see(
    now: Program, then: Program, sums: Mapping[tuple[str, Form], _Sums], fold: Sequence[Flat], names: Mapping[str, str]
) -> int:
    """Show all sums what the programs make of the data; return the number of samples."""
    sources = {names.get(name, name) for name, _ in sums}
    targets = {name for each in sums.values() for name, _ in each.targets}
    samples = 0
    for flat in fold:
        samples += samples_of(then, flat)
        made = _values(then, flat, targets if now is not then else targets | sources)
        read = made if now is then else _values(now, flat, sources)
        for (source, _), each in sums.items():
            each.update(read[names.get(source, source)], made)
    return samples


def _values(program: Program, flat: Flat, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return some values of a run."""
    found = dict[str, torch.Tensor]()

    def see(node: fx.Node, value: torch.Tensor) -> None:
        if node.name in names:
            found[node.name] = value

    observe(program, [flat], see)
    return found


def _solve(form: Form, halves: list[Columns]) -> Fitted:
    length = form.row
    gone = torch.arange(length + form.outputs) >= length
    rows = torch.cat([torch.zeros(form.outputs, length), torch.eye(form.outputs)], 1).double()
    damping = choose_damping(halves, rows, gone, shifted=True)
    whole = halves[0] if len(halves) == 1 else halves[0].joined(halves[1])
    spread = whole.damped(damping, shifted=True)
    weight = torch.linalg.solve(spread[:length, :length], spread[:length, length:]).T.contiguous()
    bias = whole.mean[length:] - weight @ whole.mean[:length]
    if passes(form, form.outputs):
        weight.unflatten(1, (form.inputs, -1))[:, :, form.kernel**2 // 2].diagonal().add_(1.0)
    return weight, bias


def merge(program: Program, choice: Choice, layer: Fitted, names: Mapping[str, str]) -> tuple[str, str]:
    """Put a layer in a segment's place; return what its target was called, and what it is called now.

    Call ``program.refresh()`` when all are done.
    """
    segment, form = choice
    module, (path, *_) = program.graph_module, segment.modules
    nodes = {node.name: node for node in program.graph.nodes}
    source, target = nodes[names.get(segment.source, segment.source)], nodes[segment.target]
    result = nodes[segment.result]
    activation = Merged.activation(result) if result is not target else None
    stride = "x".join(map(str, form.stride)) if form.op == "conv2d" else "-"
    record = (segment.modules, f"{form.op} {stride} {activation or '-'}")
    new = source
    if layer is not None:
        with program.graph.inserting_before(target):
            new = emit(module, source, _operator(form, *layer), like=target, bias=True)
        new.meta["nn_module_stack"] = {path: (path, Merged.__name__)}
    new.meta[STANDS_FOR] = (*new.meta.get(STANDS_FOR, ()), record)
    target.replace_all_uses_with(new)
    if result is not target:
        result.meta["nn_module_stack"] = {path: (path, Merged.__name__)}
    graph.remove_unused(module)
    for name in ("weight", "bias") if new is not source else ():
        graph.move_weight(module, graph.argument(new, name), f"{path}.0.{name}")
    return segment.target, new.name


def _operator(form: Form, weight: torch.Tensor, bias: torch.Tensor) -> Affine:
    """Return a layer in the words of the algebra."""
    if form.op == "linear":
        return Affine(Kernel(weight.shape, lambda: weight), bias, (), (), (), 1)
    sides, pads = (form.kernel,) * 2, ((form.kernel // 2,) * 2,) * 2
    kernel = weight.unflatten(1, (-1, *sides))
    return Affine(Kernel(kernel.shape, lambda: kernel), bias, form.stride, pads, (1, 1), 1)


def choose(candidates: Sequence[tuple[Choice, float, float]], wanted: float) -> list[Choice]:
    """Return segments that do not overlap, of which enough goes with the least noise; as much as can go where none do.

    Args:
        candidates: Each with what it takes off, and with what the answers lose by it alone.
        wanted: What is to go.
    """
    ordered = sorted(candidates, key=lambda each: each[0][0].last)
    ends = [segment.last for (segment, _), _, _ in ordered]
    table = np.full((len(ordered) + 1, _STEPS + 1), np.inf)
    table[:, 0] = 0.0
    before = [int(np.searchsorted(ends, segment.first)) for (segment, _), _, _ in ordered]
    steps = [min(int(gain / wanted * _STEPS), _STEPS) for _, gain, _ in ordered]
    for place, (_, _, noise) in enumerate(ordered):
        shifted = table[before[place], np.maximum(np.arange(_STEPS + 1) - steps[place], 0)] + noise
        table[place + 1] = np.minimum(table[place], shifted)
    left = int(np.flatnonzero(np.isfinite(table[-1]))[-1])
    found, place = list[Choice](), len(ordered)
    while place and left:
        if table[place, left] == table[place - 1, left]:
            place -= 1
            continue
        found.append(ordered[place - 1][0])
        place, left = before[place - 1], max(left - steps[place - 1], 0)
    return found[::-1]


def apply(then: Program, chosen: Iterable[Choice], folds: Sequence[Sequence[Flat]], program: Program) -> None:
    """Merge segments of a program, the first first; each makes up for what those before it lost.

    Args:
        then: The program as it was.
        chosen: Its segments.
        folds: Batches that layers are fitted on.
        program: A clone of it, changed in place.
    """
    names: dict[str, str] = {}
    for choice in chosen:
        layers = fit(program, then, [choice], folds, names)
        if choice in layers:
            old, new = merge(program, choice, layers[choice], names)
            names[old] = new
            program.graph_module.recompile()
