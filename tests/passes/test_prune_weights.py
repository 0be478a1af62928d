from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx, nn

from optimize import graph, invariants, ops
from optimize.errors import Refused, UsageError
from optimize.frontend import capture
from optimize.passes.prune_weights import PruneWeights
from optimize.program import Program
from tests import references
from tests.nets import Called
from tests.slow import but_slowly

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
    invariants.check(sparse)
    sparse.export()


def test_a_shared_weight_counts_once() -> None:
    net = Called(lambda m, x: m.layer(m.layer(x)), layer=nn.Linear(6, 6))
    sparse, outcome = PruneWeights(0.5).apply(capture(net.eval(), (torch.rand(2, 6),)))
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


def sets_of(layer: fx.Node, tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return the weights of neighbours along the inputs, ``[n, width]``, written apart from the pass."""
    axis = 0 if graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS) else 1
    return torch.stack(tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis]).split(width, 1)).reshape(-1, width)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "1:2", "3:8"])
@pytest.mark.parametrize("name", but_slowly(["resnet", "mobilenetv3", "unet", "vit"], {"mobilenetv3", "resnet"}))
def test_of_every_m_neighbours_n_are_left(name: str, pattern: str) -> None:
    kept, width = map(int, pattern.split(":"))
    sparse, outcome = PruneWeights(pattern=pattern).apply(reference(name))
    done = {rewrite.where for rewrite in outcome.rewrites if "weights zero" in rewrite.what}
    assert done
    for layer in graph.calls(sparse.graph, *ops.WEIGHTED):
        tensor = graph.attribute(sparse.graph_module, str(graph.argument(layer, "weight").target))
        if graph.origin(layer) in done:
            assert set((sets_of(layer, tensor, width) != 0).sum(1).tolist()) == {kept}
    for skip in outcome.skips:
        assert "no multiples of the pattern" in skip.reason


@pytest.mark.parametrize("name", ["resnet", "unet", "vit"])
def test_channels_change_places_and_outputs_stay(name: str) -> None:
    program = reference(name)
    moved = program.clone()
    told = PruneWeights(pattern="2:4")._permute(moved)
    moved.refresh()
    assert told
    for want, got in zip(program.run(program.inputs), moved.run(program.inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    left = []
    for permute in (True, False):
        sparse, _ = PruneWeights(pattern="2:4", permute=permute).apply(program)
        left.append(sum(float(tensor.abs().sum()) for tensor in weights(sparse)))
    assert left[0] > left[1]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_blocks_go_whole_and_the_smallest_first(scope: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1)).eval()
    program = capture(net, (torch.rand(2, 4, 6, 6),))
    sparse, outcome = PruneWeights(0.5, pattern="4x2", scope=scope).apply(program)  # type: ignore[arg-type]
    assert [skip.reason for skip in outcome.skips] == ["its 3 x 8 channels are no multiples of the pattern '4x2'"]
    gone, left = [], []
    for before, after in list(zip(weights(program), weights(sparse), strict=True))[:2]:
        for o, i in ((o, i) for o in range(0, 8, 4) for i in range(0, before.shape[1], 2)):
            old, new = (tensor[o : o + 4, i : i + 2].flatten(2) for tensor in (before, after))
            for tap in range(old.shape[2]):
                assert torch.equal(new[..., tap], old[..., tap]) or not new[..., tap].any()
                (left if new[..., tap].any() else gone).append(float(old[..., tap].abs().sum()))
    assert len(gone) == len(left) if scope == "global" else len(gone) == 18 + 4
    assert scope == "layer" or max(gone) <= min(left)


def test_weights_may_go_by_what_training_said() -> None:
    program = capture(nn.Linear(4, 2, bias=False).eval(), (torch.rand(2, 4),))
    scores = {"weight": torch.tensor([[0.0, 5.0, -3.0, 1.0], [2.0, -9.0, 4.0, 0.5]])}
    sparse, _ = PruneWeights(0.5, criterion="movement", scores=scores).apply(program)
    assert (sparse.graph_module.weight != 0).tolist() == [[False, True, False, True], [True, False, True, False]]
    with pytest.raises(Refused, match="there is none among the scores"):
        PruneWeights(0.5, criterion="movement").apply(program)


@pytest.mark.parametrize("pattern", [None, "2:4", "2x1"])
def test_masks_say_what_is_zero(pattern: str | None) -> None:
    entry = PruneWeights(None if pattern == "2:4" else 0.5, pattern=pattern, permute=False)
    program = reference("unet")
    sparse, _ = entry.apply(program)
    masks = entry.masks(program)
    for path, mask in masks.items():
        zeroed = graph.attribute(program.graph_module, path) * mask
        assert torch.equal(zeroed, graph.attribute(sparse.graph_module, path))
    assert masks


def test_notes_say_who_gains_by_zeros() -> None:
    program = capture(nn.Linear(8, 8).eval(), (torch.rand(2, 8),))
    notes = {pattern: PruneWeights(pattern=pattern).apply(program)[1].notes for pattern in ("2:4", "1:4")}
    assert "tensorrt.sparse_weights=true" in notes["2:4"][0] and "On CPUs" in notes["2:4"][0]
    assert "nor the kernels faster" in notes["1:4"][0]


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 1.0},
        {"ratio": -0.1},
        {"ratio": 0.5, "scope": "model"},
        {},
        {"ratio": 0.5, "pattern": "2:4"},
        {"pattern": "4:2"},
        {"pattern": "4:4"},
        {"ratio": 0.5, "pattern": "0x4"},
        {"ratio": 0.5, "pattern": "4"},
        {"pattern": "4x1"},
        {"ratio": 0.5, "criterion": "l1"},
        {"ratio": 0.5, "scores": {}},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="PruneWeights"):
        PruneWeights(**options)  # type: ignore[arg-type]
