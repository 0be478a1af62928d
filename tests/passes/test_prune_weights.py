from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from optimize import graph, invariants, ops
from optimize.errors import UsageError
from optimize.frontend import capture
from optimize.passes.prune_weights import PruneWeights
from optimize.program import Program
from tests import references

torch.set_num_threads(1)


def weights(program: Program) -> list[torch.Tensor]:
    """Return the weight tensors of the layers, each once."""
    layers = graph.calls(program.graph, *ops.WEIGHTED)
    tensors = [graph.attribute(program.graph_module, str(graph.argument(layer, "weight").target)) for layer in layers]
    return list({id(tensor): tensor for tensor in tensors}.values())


def reference(name: str) -> Program:
    return references.captured(name, None)


@pytest.mark.parametrize("ratio", [0.0, 0.123, 0.5, 0.9])
@pytest.mark.parametrize("name", ["resnet", "mobilenetv3", "unet", "vit"])
def test_global_count_and_threshold(name: str, ratio: float) -> None:
    program = reference(name)
    sparse, outcome = PruneWeights(ratio).apply(program)
    before, after = (torch.cat([tensor.flatten() for tensor in weights(p)]) for p in (program, sparse))
    zero = after == 0
    assert int(zero.sum()) == int(ratio * len(after))
    assert torch.equal(after[~zero], before[~zero])
    assert not zero.any() or before[zero].abs().max() <= before[~zero].abs().min()
    assert bool(outcome.rewrites) == (ratio > 0) == bool(outcome.notes)


def test_layer_scope_counts_in_each_layer() -> None:
    sparse, outcome = PruneWeights(0.3, scope="layer").apply(reference("unet"))
    assert [int((tensor == 0).sum()) for tensor in weights(sparse)] == [int(0.3 * t.numel()) for t in weights(sparse)]
    assert len(outcome.rewrites) == len(weights(sparse))


def test_of_equals_the_first_go() -> None:
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, -0.5)
    sparse, outcome = PruneWeights(0.4).apply(capture(layer.eval(), (torch.rand(2, 4),)))
    assert (sparse.graph_module.get_parameter("weight") == 0).flatten().tolist() == [True] * 3 + [False] * 5
    assert outcome.rewrites[0].what == "3 of 8 weights zero"


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_second_run_does_nothing(scope: str) -> None:
    entry = PruneWeights(0.5, scope=scope)  # type: ignore[arg-type]
    sparse, _ = entry.apply(reference("resnet"))
    forgotten = dataclasses.replace(sparse, applied=())
    again, outcome = entry.apply(forgotten)
    assert again is forgotten and not outcome.rewrites, "the zeros are the smallest weights already"


def test_biases_norms_and_the_given_program_stay() -> None:
    program = reference("resnet")
    state = {path: tensor.clone() for path, tensor in program.graph_module.state_dict().items()}
    sparse, _ = PruneWeights(0.7).apply(program)
    for path, tensor in program.graph_module.state_dict().items():
        assert torch.equal(tensor, state[path])
    pruned = {id(tensor) for tensor in weights(sparse)}
    for path, tensor in (*sparse.graph_module.named_parameters(), *sparse.graph_module.named_buffers()):
        if id(tensor) not in pruned:
            assert torch.equal(tensor, state[path])
    invariants.check(sparse, deep=True)


def test_a_shared_weight_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    sparse, outcome = PruneWeights(0.5).apply(capture(Twice().eval(), (torch.rand(2, 6),)))
    assert [entry.what for entry in outcome.rewrites] == ["18 of 36 weights zero"]
    assert len(weights(sparse)) == 1


def test_recurrent_and_computed_weights_are_skipped() -> None:
    program = reference("lstm")
    _, outcome = PruneWeights(0.5).apply(program)
    assert [(skip.op, skip.reason) for skip in outcome.skips] == [("lstm", "recurrent weights are not pruned")]
    computed = capture(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)).eval(), (torch.rand(2, 4),))
    unchanged, outcome = PruneWeights(0.5).apply(computed)
    assert unchanged is computed
    assert [(skip.op, skip.reason) for skip in outcome.skips] == [("linear", "its weight is computed")]


def test_notes_say_what_it_does_not_bring() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        layers[0].weight.mul_(1e-6)
    _, outcome = PruneWeights(0.5).apply(capture(layers.eval(), (torch.rand(2, 8),)))
    assert outcome.notes[0] == "All weights are zero in 0."
    assert "neither the file smaller nor the kernels faster" in outcome.notes[1]
    assert "not fine-tuned" in outcome.notes[2]


@pytest.mark.parametrize("options", [{"ratio": 1.0}, {"ratio": -0.1}, {"ratio": 0.5, "scope": "model"}])
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="PruneWeights"):
        PruneWeights(**options)  # type: ignore[arg-type]
