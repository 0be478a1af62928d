"""Merge linear branches, parallel or in series, into one convolution."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import channelwise
from optimize.algebra.emit import emit
from optimize.algebra.regions import Regions, why_apart
from optimize.algebra.terms import Layout, Term, join
from optimize.errors import UsageError, nearest
from optimize.graph import aten
from optimize.passes.base import Outcome, Pass, Rewrite, Skip
from optimize.program import Program, tensor_value
from optimize.quantization import merge_outlook
from optimize.records import MergeOutlook
from optimize.registry import register_pass


@register_pass
@dataclass(frozen=True)
class Reparameterize(Pass):
    """Merge linear branches (convolutions, BatchNorm, identity, pools, scales) into one convolution or linear layer.

    Every value that is built from one input by convolutions (any kernel, stride, dilation, groups), linear layers,
    BatchNorm, scales and shifts, average pools, paddings, sums, differences, concatenation and operators in series is
    one affine operator; ``docs/algebra.md`` states and proves the laws. RepVGG, ACNet, Diverse Branch, MobileOne,
    RepLKNet, RepMixer and low-rank adapters are such values; no model is known by name. The merged weight
    ``[C_out, C_in/groups, *K]`` takes the path of the module that held the branches, so a block of branches that stands
    at ``layer1.conv`` becomes ``layer1.conv.weight``. A BatchNorm behind that module is left for ``FuseConvBN``
    while the program keeps its BatchNorms, and merged with it once they are folded.

    When it applies: one operator costs no more multiply-accumulates than the parts and has at most twice their weights.
    Skipped, with the reason: different strides or padding modes, paddings that do not line up, zero padding behind a
    bias (border pixels), a nonlinear operator in between, a value that is used elsewhere, a merged kernel that would
    cost more, merged weights that overflow, BatchNorm with the statistics of the batch, blocks named in ``leave``.

    What it costs: nothing at run time. A merged kernel can be harder to quantize (X. Chu et al., 2022, arXiv
    2212.01593): ``outcome.merges`` says how much, and what to do.

    Attributes:
        leave: Module paths of blocks to leave unmerged, such as ``("stages.0.1",)``.

    Example:
        >>> import torch, optimize
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense, self.point = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 1)
        ...     def forward(self, x):
        ...         return self.dense(x) + self.point(x) + x
        >>> program = optimize.capture(Block().eval(), (torch.zeros(2, 4, 8, 8),))
        >>> program, outcome = Reparameterize().apply(program)
        >>> dict(program.stats().ops)
        {'conv2d': 1}

    Source: X. Ding et al., "RepVGG", 2021, arXiv 2101.03697; "ACNet", 2019, arXiv 1908.03930; "Diverse Branch Block",
    2021, arXiv 2103.13425.
    """

    leave: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "leave", tuple(self.leave))

    def rewrite(self, program: Program) -> Outcome:
        """Merge every region that pays, until nothing is left: a merge can free a value of its other reader."""
        module = program.graph_module
        keeps_norms = _keeps_norms(module)
        rewrites: list[Rewrite] = []
        outlooks: list[MergeOutlook] = []
        while True:
            merges = [_Merging(module, layout, self.leave, keeps_norms) for layout in Layout]
            for merging in merges:
                merging.run()
            written = [entry for merging in merges for entry in reversed(merging.written)]
            if not written:
                self._check_leave([entry.where for entry in rewrites], merges)
                skips = [skip for merging in merges for skip in reversed(merging.skips)]
                return Outcome(tuple(rewrites), tuple(dict.fromkeys(skips)), merges=tuple(outlooks))
            graph.remove_unused(module)  # frees the paths that the merged weights take over
            outlooks += filter(None, [entry.settle(module) for entry in written])
            rewrites += [entry.rewrite for entry in written]

    def _check_leave(self, merged: Sequence[str], merges: Sequence[_Merging]) -> None:
        """Check that every path of ``leave`` named a block.

        Raises:
            UsageError: One did not.
        """
        left = {home for merging in merges for home in merging.left}
        for path in self.leave:
            if not any(graph.is_within(home, path) for home in left):
                known = sorted({*merged, *left})
                raise UsageError(
                    f"Reparameterize(leave=...): no block of branches is at '{path}'.", hint=nearest(path, known)
                )


@dataclass(frozen=True)
class _Written:
    """One merged operator in the graph, its weights still under provisional paths."""

    rewrite: Rewrite
    weight: fx.Node
    bias: fx.Node | None
    outlook: MergeOutlook | None

    def settle(self, module: fx.GraphModule) -> MergeOutlook | None:
        """Move the weights to the paths of the module they stand for."""
        path = graph.move_weight(module, self.weight, _join(self.rewrite.where, "weight"))
        if self.bias is not None:
            graph.move_weight(module, self.bias, _join(self.rewrite.where, "bias"))
        return None if self.outlook is None else dataclasses.replace(self.outlook, weight=path)


@dataclass
class _Merging:
    """The merges of one layout, outermost region first."""

    module: fx.GraphModule
    layout: Layout
    leave: tuple[str, ...]
    keeps_norms: bool
    written: list[_Written] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Visit every value from the outputs to the inputs; what a region has taken in is not visited again."""
        regions = Regions(self.module, self.layout)
        done: set[fx.Node] = set()
        for node in reversed(list(self.module.graph.nodes)):
            if node.op != "call_function" or node in done:
                continue
            terms = regions.terms(node)
            if node in regions.refusals:
                self._skip(node, regions.refusals[node])
            if len(terms) > 1:
                taken = self._visit_sum(regions, node, terms)
            else:
                taken = self._visit_series(regions, node, *terms)
            regions.forget(taken)
            done |= taken

    def _visit_series(self, regions: Regions, node: fx.Node, term: Term | None = None) -> Set[fx.Node]:
        """Merge a value that is one operator; return the calls it stood for."""
        if term is None or term.leaves < 2 or not term.weighted:
            return frozenset()
        if self.keeps_norms and self._is_outer_norm(regions, node):
            return frozenset()
        if not term.pays:
            self._skip(node, term.why_not)
            return frozenset()
        if self._is_left(term, node) or not self._fits(term, node):
            return frozenset()
        node.replace_all_uses_with(self._write(node, term))
        return term.nodes

    def _visit_sum(self, regions: Regions, node: fx.Node, terms: Sequence[Term]) -> Set[fx.Node]:
        """Merge the terms of one source; return the calls that need no visit of their own."""
        chain = _chain(regions, node)
        groups, apart = join(terms, self.layout)
        merged = [group.term for group in groups if len(group.members) > 1 and group.term.weighted]
        kept = [term for group in groups if group.term not in merged for term in group.members]
        for term, reason in apart:
            self._skip(term.value, reason)
        reason = why_apart(regions, [*merged, *kept])
        if reason:
            self._skip(node, reason)
        if not merged or any(self._is_left(term, node) or not self._fits(term, node) for term in merged):
            return chain
        values = [(self._write(node, term), 1) for term in merged] + [(term.value, term.sign) for term in kept]
        node.replace_all_uses_with(_total(self.module, node, values))
        return chain.union(*(term.nodes for term in merged))

    def _write(self, node: fx.Node, term: Term) -> fx.Node:
        home = _home(term) or graph.origin(node)
        has_bias = bool(term.operator.bias.any()) or any(map(_has_bias, term.nodes))
        with self.module.graph.inserting_before(node):
            call = emit(self.module, term.source, term.operator, like=node, bias=has_bias)
        counts = Counter(graph.op_name(entry) for entry in term.nodes)
        parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        prospects = None
        if len(term.parts) > 1:
            prospects = merge_outlook.compare(home, "", [part.weight for part in term.parts], term.operator.weight)
        rewrite = Rewrite(home, f"{parts} merged into one {graph.op_name(call)}")
        weight, bias = graph.argument(call, "weight"), graph.argument(call, "bias")
        self.written.append(_Written(rewrite, weight, bias, prospects))
        return call

    def _skip(self, node: fx.Node, reason: str) -> None:
        self.skips.append(Skip(graph.origin(node), graph.op_name(node), reason))

    def _is_left(self, term: Term, node: fx.Node) -> bool:
        home = _home(term) or graph.origin(node)
        is_left = any(graph.is_within(home, path) for path in self.leave)
        if is_left:
            self.left.append(home)
            self._skip(node, "left unmerged, as asked")
        return is_left

    def _fits(self, term: Term, node: fx.Node) -> bool:
        """Say whether the merged weights are numbers of the value's dtype."""
        dtype = cast(torch.Tensor, tensor_value(node)).dtype
        fits = all(bool(tensor.to(dtype).isfinite().all()) for tensor in (term.operator.weight, term.operator.bias))
        if not fits:
            self._skip(node, f"the merged weights do not fit {str(dtype).removeprefix('torch.')}")
        return fits

    def _is_outer_norm(self, regions: Regions, node: fx.Node) -> bool:
        """Say whether a call only scales a merged block from outside the module that holds the block."""
        if not graph.is_call(node, *channelwise.OPERATORS):
            return False
        inner = regions.single(cast(fx.Node, node.args[0]))
        home = _home(inner) if inner is not None and inner.leaves > 1 else ""
        own = _parameters([node])
        return bool(home) and bool(own) and not any(path.startswith(f"{home}.") for path in own)


def _chain(regions: Regions, node: fx.Node) -> set[fx.Node]:
    """Return the sums that were read flat as one."""
    found, open_ends = set[fx.Node](), [node]
    while open_ends:
        entry = open_ends.pop()
        found.add(entry)
        operands = [operand for operand in entry.args[:2] if isinstance(operand, fx.Node)]
        open_ends += [operand for operand in operands if graph.reads(operand) == 1 and len(regions.terms(operand)) > 1]
    return found


def _total(module: fx.GraphModule, root: fx.Node, values: Sequence[tuple[fx.Node, int]]) -> fx.Node:
    """Write the sum of signed values, the first of them positive, before ``root``."""
    total = values[0][0]
    with module.graph.inserting_before(root):
        for value, sign in values[1:]:
            total = module.graph.call_function(ops.SUMS[0] if sign > 0 else ops.SUMS[1], (total, value))
            graph.normalize_arguments(total)
            total.meta = dict(root.meta)
    return total


def _home(term: Term) -> str:
    """Return the path of the module that holds all parameters of a term, or of its largest layer when there is none."""
    levels = zip(*(path.split(".")[:-1] for path in _parameters(term.nodes)), strict=False)
    shared = ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))
    if shared:
        return shared
    layers = [node for node in term.nodes if graph.is_call(node, *ops.WEIGHTED)]
    largest = max(layers, key=lambda node: (graph.argument(node, "weight").meta["val"].numel(), node.name))
    return next(iter(_parameters([largest]))).rpartition(".")[0]


def _parameters(nodes: Iterable[fx.Node]) -> list[str]:
    """Return the paths of the parameters that calls read, those of parametrizations under their module's name."""
    found = set[str]()
    for node in nodes:
        for source in node.all_input_nodes:
            found |= graph.weights_behind(source)
    return sorted(
        path.split(".parametrizations.")[0] + ".weight" if ".parametrizations." in path else path for path in found
    )


def _has_bias(node: fx.Node) -> bool:
    if graph.is_call(node, aten.batch_norm.default):
        return True
    return graph.is_call(node, *ops.WEIGHTED) and graph.argument(node, "bias") is not None


def _keeps_norms(module: fx.GraphModule) -> bool:
    """Say whether the program still has a BatchNorm or scale behind a layer: its keys are those of the user's model."""
    operators = (channelwise.read(module, node) for node in graph.calls(module.graph, *channelwise.OPERATORS))
    sources = [operator.source for operator in operators if operator is not None]
    return any(graph.is_call(source, *ops.WEIGHTED) and graph.reads(source) == 1 for source in sources)


def _join(*names: str) -> str:
    return ".".join(filter(None, names))
