"""Which channels matter, by name: what a criterion reads of a layer, and a formula of it.

A formula says of each output channel of a layer how much it matters, ``[C_out]``; where it reads data, what it says of
each sample is summed. ``importance`` joins what the layers of a group say. Without a loss, gradients are those of the
outputs' sum under random signs: on average over the signs, the square of what it changes to first order is that of the
change of the outputs (M. Hutchinson, 1989), and no labels are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize import graph, ops
from optimize.data import Given, Samples, open_data
from optimize.errors import Refused, UsageError, blaming
from optimize.program import Program, tensor_value
from optimize.pruning.compensation import no_samples
from optimize.pruning.groups import Dependencies
from optimize.pruning.importance import filters, filters_of, norm_of
from optimize.quantization.batches import FlatBatches, sample_specs
from optimize.quantization.calibrate import Observation, observe

#: Samples that activations are taken of, and gradients, one after the other.
SEEN, LEARNED = 512, 128

#: What a criterion reads, and what its formula is given; rows are output channels, all float64.
#: ``weights``: ``w [C, K]``, times what a BatchNorm behind them multiplies by.
#: ``gamma``: ``g [C, 1]``, the scale of the BatchNorm that alone reads the layer.
#: ``activations``: ``x [C, M]``, of a batch, behind the BatchNorm and the activation that alone read it.
#: ``gate``: ``y [C, M]`` and ``dL/dy``, of a sample, behind the BatchNorm that alone reads it.
#: ``gradients``: ``w [C, K]`` and ``dL/dw``, of a sample.
#: ``scores``: ``s [C, K]``, what training said of each weight.
#: ``chance``: numbers ``[C, 1]`` drawn evenly from 0 to 1.
Reads = Literal["weights", "gamma", "activations", "gate", "gradients", "scores", "chance"]


@dataclass(frozen=True)
class Criterion:
    """How channels are told apart.

    Attributes:
        reads: What of a layer it reads.
        score: Returns how much each channel matters ``[C]``.
    """

    reads: Reads
    score: Callable[..., torch.Tensor]


def _apart(rows: torch.Tensor) -> torch.Tensor:
    """Return how far each row is from all others together: a duplicate of another is near."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


Name = Literal[
    "l1", "l2", "fpgm", "bn", "apoz", "activation", "taylor", "hessian", "snip", "movement", "random", "zeros"
]  # fmt: skip
#: H. Li et al., 2016, arXiv 1608.08710 (l1, l2); Z. Liu et al., "Network Slimming", 2017, arXiv 1708.06519 (bn); Y. He
#: et al., "Filter Pruning via Geometric Median", 2018, arXiv 1811.00250 (fpgm); H. Hu et al., "Network Trimming", 2016,
#: arXiv 1607.03250 (apoz); P. Molchanov et al., 2016, arXiv 1611.06440 (activation); P. Molchanov et al., "Importance
#: Estimation", 2019, arXiv 1906.10771 (taylor, by gates); Y. LeCun et al., "Optimal Brain Damage", 1989, with Fisher's
#: information on the diagonal (hessian); N. Lee et al., "SNIP", 2018, arXiv 1810.02340 (snip); V. Sanh et al.,
#: "Movement Pruning", 2020, arXiv 2005.07683 (movement).
CRITERIA: Mapping[Name, Criterion] = {
    "l1": Criterion("weights", lambda w: w.abs().sum(1)),
    "l2": Criterion("weights", lambda w: w.square().sum(1)),
    "fpgm": Criterion("weights", _apart),
    "bn": Criterion("gamma", lambda g: g.abs().sum(1)),
    "apoz": Criterion("activations", lambda x: (x > 0).double().sum(1)),
    "activation": Criterion("activations", lambda x: x.abs().sum(1)),
    "taylor": Criterion("gate", lambda y, slope: (y * slope).sum(1).square()),
    "hessian": Criterion("gradients", lambda w, slope: (w * slope).square().sum(1)),
    "snip": Criterion("gradients", lambda w, slope: (w * slope).abs().sum(1)),
    "movement": Criterion("scores", lambda s: s.sum(1)),
    "random": Criterion("chance", lambda draw: draw.sum(1)),
}


@dataclass(frozen=True)
class Evidence:
    """What criteria may read beside the program.

    Attributes:
        data: Samples; labelled ones where there is a loss.
        loss: Returns a number to be differentiated, of outputs as the module returned them and labels.
        scores: What training said of each weight, by its path.
        seed: Of what is drawn.
    """

    data: Given | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    scores: Mapping[str, torch.Tensor] | None = None
    seed: int = 0


def score_layers(program: Program, found: Dependencies, name: Name, evidence: Evidence) -> dict[fx.Node, torch.Tensor]:
    """Return how much each output channel of each layer matters, float64 ``[C_out]``; some layers have no say.

    Args:
        name: One of ``CRITERIA``.
        evidence: What else is known.

    Raises:
        Refused: The data has no samples or does not fit, the loss fails, or scores are of other weights.
        UsageError: A loss reads labels, and there are none.
    """
    criterion = CRITERIA[name]
    totals: dict[fx.Node, torch.Tensor] = {}

    def add(layer: fx.Node, *read: torch.Tensor) -> None:
        said = criterion.score(*read)
        totals[layer] = totals[layer] + said if layer in totals else said

    with torch.inference_mode(False), torch.enable_grad():
        _READERS[criterion.reads](program, found, evidence, add)
    return totals


#: Reads something of every layer and hands it on, whenever there is some.
_Reader = Callable[[Program, Dependencies, Evidence, Callable[..., None]], None]


def _read_weights(program: Program, found: Dependencies, _: Evidence, add: Callable[..., None]) -> None:
    for layer in found.outputs:
        add(layer, filters(program.graph_module, layer))


def _read_gamma(program: Program, found: Dependencies, _: Evidence, add: Callable[..., None]) -> None:
    for layer in found.outputs:
        norm = norm_of(layer)
        gamma = None if norm is None else graph.constant(program.graph_module, graph.argument(norm, "weight"))
        if gamma is not None:
            add(layer, gamma.detach().double()[:, None])


def _read_activations(program: Program, found: Dependencies, evidence: Evidence, add: Callable[..., None]) -> None:
    behind = {_activated(_gate(layer)): layer for layer in found.outputs}

    def see(node: fx.Node, value: torch.Tensor) -> None:
        if node in behind:
            add(behind[node], _rows(behind[node], value))

    if not observe(program, FlatBatches(program, evidence.data or ()).first(SEEN), see):
        raise no_samples()


def _read_gate(program: Program, found: Dependencies, evidence: Evidence, add: Callable[..., None]) -> None:
    behind = {_gate(layer).name: layer for layer in found.outputs if tensor_value(_gate(layer)) is not None}
    for _, kept in _differentiated(program, found, evidence, behind):
        for name, value in kept.items():
            if value.grad is not None:
                add(behind[name], _rows(behind[name], value.detach()), _rows(behind[name], value.grad))


def _read_gradients(program: Program, found: Dependencies, evidence: Evidence, add: Callable[..., None]) -> None:
    def held(weight: fx.Node) -> torch.Tensor:
        return graph.attribute(program.graph_module, str(weight.target)).detach()

    for module, _ in _differentiated(program, found, evidence, ()):

        def slope(weight: fx.Node, module: fx.GraphModule = module) -> torch.Tensor:
            found = graph.attribute(module, str(weight.target)).grad
            return torch.zeros_like(held(weight)) if found is None else found

        for layer in found.outputs:
            add(layer, filters_of(layer, held), filters_of(layer, slope))


def _read_scores(program: Program, found: Dependencies, evidence: Evidence, add: Callable[..., None]) -> None:
    def said(weight: fx.Node) -> torch.Tensor:
        return scores_of(program.graph_module, str(weight.target), evidence.scores or {})

    for layer in found.outputs:
        add(layer, filters_of(layer, said))


def scores_of(module: fx.GraphModule, path: str, scores: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what training said of a weight, shaped like it.

    Raises:
        Refused: It said nothing, or of a weight of another shape.
    """
    said, shape = scores.get(path), graph.attribute(module, path).shape
    if not isinstance(said, torch.Tensor) or said.shape != shape:
        found = f"a score is {list(said.shape)}" if isinstance(said, torch.Tensor) else "there is none"
        hint = "Give History.movement of a Training(..., movement=True) of this very module."
        raise Refused(f"'{path}' has weights of {list(shape)}, and {found} among the scores.", hint=hint)
    return said.detach().cpu()


def _read_chance(program: Program, found: Dependencies, evidence: Evidence, add: Callable[..., None]) -> None:
    draw = torch.Generator().manual_seed(evidence.seed)
    for layer, channels in found.outputs.items():
        add(layer, torch.rand(len(channels), 1, generator=draw, dtype=torch.float64))


_READERS: Mapping[Reads, _Reader] = {
    "weights": _read_weights,
    "gamma": _read_gamma,
    "activations": _read_activations,
    "gate": _read_gate,
    "gradients": _read_gradients,
    "scores": _read_scores,
    "chance": _read_chance,
}


def _gate(layer: fx.Node) -> fx.Node:
    return norm_of(layer) or layer


def _activated(node: fx.Node) -> fx.Node:
    """Return the activation that alone reads a value, or the value itself."""
    reader = next(iter(node.users), node)
    alone = len(node.users) == 1 and reader.all_input_nodes == [node] and ops.is_elementwise(reader)
    return reader if alone else node


def _rows(layer: fx.Node, value: torch.Tensor) -> torch.Tensor:
    """Return a value a row an output channel of the layer before it, float64 ``[C_out, M]``."""
    return value.movedim(ops.channel_axis(layer, layer), 0).flatten(1).double()


def _differentiated(
    program: Program, found: Dependencies, evidence: Evidence, kept: Collection[str]
) -> Iterator[tuple[fx.GraphModule, dict[str, torch.Tensor]]]:
    """Yield after each sample the weights with their gradients, and the values of some calls by name with theirs."""
    module = program.clone().graph_module
    for layer in found.outputs:
        for node in layer.all_input_nodes:
            if node.op == "get_attr":
                graph.attribute(module, str(node.target)).requires_grad_()
    draw, is_empty = torch.Generator().manual_seed(evidence.seed), True
    for flat, labels in _samples(program, evidence):
        values: dict[str, torch.Tensor] = {}

        def see(node: fx.Node, value: torch.Tensor, values: dict[str, torch.Tensor] = values) -> None:
            if node.name in kept and value.requires_grad:
                value.retain_grad()
                values[node.name] = value

        outputs = pytree.tree_leaves(Observation(module, see).run(*flat, enable_io_processing=False))
        if evidence.loss is None:
            signs = (2 * torch.randint(2, value.shape, generator=draw) - 1 for value in outputs)
            loss: Any = sum((value * sign).sum() for value, sign in zip(outputs, signs, strict=True))
        else:
            loss = _lost(evidence.loss, pytree.tree_unflatten(outputs, program.out_spec), labels)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() > 1:
            raise Refused("The loss of a criterion is no number that depends on the weights.")
        loss.backward()
        is_empty = False
        yield module, values
        module.zero_grad()
    if is_empty:
        raise no_samples()


def _lost(loss: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Any:
    hint = "It is called with what the module returns for a sample, and the sample's labels."
    with blaming("The loss of a criterion", hint):
        return loss(outputs, labels)


def _samples(program: Program, evidence: Evidence) -> Iterator[tuple[Sequence[torch.Tensor], Any]]:
    """Yield samples one by one, whole batches where the batch is fixed, with labels where a loss reads them."""
    data = evidence.data or ()
    if evidence.loss is None:
        yield from ((flat, None) for flat in FlatBatches(program, data).singles(LEARNED))
        return
    if not isinstance(data, Samples):
        data = open_data(data, inputs=sample_specs(program), labelled=True, classes=False)
    if not data.labelled:
        raise UsageError(f"The loss of a criterion reads labels, and '{data.name}' has none.", hint="Leave loss out.")
    size = 1 if program.batch else program.samples
    for batch in itertools.islice(data.batches(size), -(-LEARNED // size)):
        if len(batch) == size:
            yield batch.inputs, batch.labels
