"""Pruning while training: schedules, zeros that stay, movement, tickets; and modules that are computed again."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import optimize
from optimize import Gradual
from optimize.errors import UsageError
from optimize.passes.gradual import CURVES, Curve, share_at
from optimize.training import Logits, Training, rewind

torch.set_num_threads(1)

Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture
def batches() -> Batches:
    torch.manual_seed(0)
    return [(torch.randn(8, 3, 6, 6), torch.randint(4, (8,))) for _ in range(6)]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Sigmoid()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def plain(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=1e-3)


def closed_form(curve: str, step: int, first: int, last: int, every: int, a: float, b: float) -> float:
    """Write each curve again, from its paper."""
    if step < first:
        return 0.0
    t = last if step >= last else first + every * math.floor((step - first) / every)
    p = 1.0 if last == first else (t - first) / (last - first)
    if curve == "agp":
        return b + (a - b) * (1 - p) ** 3
    if curve == "linear":
        return (1 - p) * a + p * b
    return b if curve == "one-shot" else 1 - math.exp((1 - p) * math.log(1 - a) + p * math.log(1 - b))


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("first", "last", "every"), [(0, 40, 1), (7, 53, 5), (3, 60, 100), (10, 10, 1)])
def test_schedules_are_their_closed_forms_at_every_step(curve: Curve, first: int, last: int, every: int) -> None:
    shares = [share_at(step, first, last, every, curve, 0.1, 0.85) for step in range(61)]
    wanted = [closed_form(curve, step, first, last, every, 0.1, 0.85) for step in range(61)]
    assert shares == pytest.approx(wanted, abs=1e-12) and shares[-1] == 0.85
    assert shares == sorted(shares) and set(shares[:first]) <= {0.0}


def test_of_what_is_left_the_same_share_goes_each_time() -> None:
    left = [1 - share_at(step, 0, 10, 1, "iterative", 0.0, 0.9) for step in range(11)]
    assert {round(after / before, 12) for before, after in itertools.pairwise(left)} == {round(0.1**0.1, 12)}


def test_zeros_stay_zero_and_the_rest_learns(batches: Batches) -> None:
    module = net()
    sparse, _ = optimize.PruneWeights(pattern="2:4", permute=False).apply(
        optimize.capture(copy.deepcopy(module).eval(), (batches[0][0],))
    )
    module = optimize.narrow(module, sparse)
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    Training(batches, epochs=2, optimizer=plain, average=0.5, keep_zeros=True)(module)
    for name, value in module.named_parameters():
        gone = (before[name] == 0) & torch.tensor(value.dim() > 1)
        assert not value[gone].any() and not torch.equal(value, before[name])
        assert bool(value[~gone].any()), "a bias that began at zero learns"
    assert int((module[3][0].weight == 0).sum()) == module[3][0].weight.numel() // 2


def test_weights_go_by_the_schedule(batches: Batches) -> None:
    module, seen = net(), []

    class Watched(Gradual):
        def masks(self, module: nn.Module, share: float, movement: Any) -> dict[str, Tensor]:
            seen.append(share)
            return super().masks(module, share, movement)

    prune = Watched(optimize.PruneWeights(0.6), (batches[0][0],), every=2, end=0.75)
    Training(batches, epochs=2, optimizer=plain, average=0.9, prune=prune)(module)
    weights = torch.cat([value.flatten() for value in module.parameters() if value.dim() > 1])
    assert int((weights == 0).sum()) == int(0.6 * len(weights))
    assert seen == pytest.approx([closed_form("agp", step, 0, 9, 2, 0.0, 0.6) for step in (2, 4, 6, 8, 9)])


@pytest.mark.parametrize("criterion", ["l1", "bn", "taylor", "movement"])
def test_channels_are_masked_then_cut_and_nothing_changes(batches: Batches, criterion: Any) -> None:
    x = batches[0][0]
    module = nn.Sequential(*net()[:4], nn.Conv2d(8, 4, 3, padding=1))  # borders read padding beside a sigmoid's half
    batches = [(x, y[:, None, None].expand(-1, 6, 6)) for x, y in batches]
    cut = optimize.PruneChannels(0.5, criterion=criterion, calibration=[x])
    prune = Gradual(cut, (x,), curve="linear", every=3)
    Training(batches, epochs=2, optimizer=plain, prune=prune, movement=criterion == "movement")(module)
    program = optimize.capture(module, (x,))
    thin, outcome = optimize.PruneChannels(0.9, criterion="zeros").apply(program)
    assert [rewrite.what for rewrite in outcome.rewrites] == ["8 -> 4 channels"] * 2
    with torch.no_grad():
        assert float((module(x) - optimize.narrow(module, thin)(x)).abs().max()) < 1e-5


def test_movement_is_the_sum_over_steps(batches: Batches) -> None:
    module, by_hand = net(), net()
    history = Training(batches, optimizer=plain, warm_up=0.0, movement=True)(module)
    optimizer, wanted = plain(list(by_hand.parameters())), torch.zeros(4, 8)
    for step, (x, y) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / len(batches)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(x), y).backward()
        wanted -= by_hand[6].weight.detach() * by_hand[6].weight.grad
        optimizer.step()
    assert torch.allclose(history.movement["6.weight"], wanted, rtol=1e-4, atol=1e-6)
    assert Training(batches)(net()).movement == {}


def test_movement_of_a_weight_with_two_names_is_found_under_both() -> None:
    module = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((4, 6), (6, 6), (6, 6), (6, 3))))
    module[2].weight = module[1].weight
    batches = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 3
    moved = Training(batches, movement=True)(module).movement
    assert torch.equal(moved["1.weight"], moved["2.weight"])
    for entry in (optimize.PruneWeights, optimize.PruneChannels):
        cut = entry(0.5, criterion="movement", scores=moved)
        assert cut.apply(optimize.capture(module, (batches[0][0],)))[1].rewrites


def test_movement_goes_on_from_a_checkpoint(batches: Batches, tmp_path: Path) -> None:
    whole = Training(batches, epochs=2, movement=True)(net()).movement
    once, module = [], net()

    def stop(module: nn.Module) -> float:
        once.append(1)
        if len(once) == 2:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        Training(batches, epochs=2, movement=True, folder=tmp_path, judge=stop)(module)
    parts = Training(batches, epochs=2, movement=True, folder=tmp_path)(net()).movement
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_ticket_goes_back_to_early_weights_and_keeps_its_zeros(batches: Batches) -> None:
    module = net()
    early = copy.deepcopy(module.state_dict())
    prune = Gradual(optimize.PruneWeights(0.5), (batches[0][0],), curve="one-shot", end=0.5)
    Training(batches, epochs=2, optimizer=plain, prune=prune)(module)
    zeros = {name: value == 0 for name, value in module.named_parameters() if value.dim() > 1}
    rewind(module, early)
    for name, value in module.state_dict().items():
        gone = zeros.get(name, torch.zeros(value.shape, dtype=torch.bool))
        assert torch.equal(value, early[name].masked_fill(gone, 0)), name
    Training(batches, optimizer=plain, keep_zeros=True)(module)
    assert all(torch.equal(module.get_parameter(name) == 0, gone) for name, gone in zeros.items())


def test_recomputed_modules_learn_the_same(batches: Batches) -> None:
    usual, saving = net(), net()
    forward = saving[3].forward
    for module, recompute in ((usual, ()), (saving, ("3", "0"))):
        Training(batches, epochs=2, optimizer=plain, recompute=recompute)(module)
    for name, value in usual.state_dict().items():
        assert torch.equal(value, saving.state_dict()[name]), name
    assert saving[3].forward == forward and "forward" not in vars(saving[3])
    with pytest.raises(UsageError, match="recompute: '9' is no module of Sequential"):
        Training(batches, recompute=("9",))(net())


def test_recomputed_modules_keep_less(batches: Batches) -> None:
    kept: list[int] = []
    for recompute in ((), ("3",)):
        held: list[int] = []

        def pack(value: Tensor, held: list[int] = held) -> Tensor:
            held.append(value.numel())
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            from optimize.training.loop import recomputing

            module = net()
            with recomputing(module, recompute):
                module(batches[0][0])
        kept.append(sum(held))
    assert kept[1] < 0.7 * kept[0]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"curve": "cubic"}, "no curve 'cubic'"),
        ({"every": 0}, "every is at least 1"),
        ({"start": 0.8, "end": 0.5}, "start <= end"),
        ({"initial": 0.7}, "initial=0.7"),
        ({"cut": optimize.PruneWeights(pattern="2:4")}, "takes all at once"),
    ],
)
def test_schedules_out_of_range_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Gradual(**{"cut": optimize.PruneWeights(0.5), "inputs": (torch.zeros(1),), **options})


def test_what_training_cannot_take_is_said_in_a_sentence(batches: Batches) -> None:
    prune = Gradual(optimize.PruneWeights(0.5), (batches[0][0],))
    with pytest.raises(UsageError, match="The best epoch that judge keeps may be one before prune was done"):
        Training(batches, prune=prune, judge=lambda module: 0.0)
    dataset = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
    with pytest.raises(UsageError, match="Training takes batches, and a Dataset gives single samples"):
        Training(dataset)
    assert len(Training(DataLoader(dataset, batch_size=16))(net()).losses) == 1


def test_patterns_of_neighbours_are_masked_at_once(batches: Batches) -> None:
    module = net()
    prune = Gradual(optimize.PruneWeights(pattern="2:4"), (batches[0][0],), curve="one-shot", start=0.5, end=0.5)
    Training([x for x, _ in batches], (Logits(),), net(), optimizer=plain, prune=prune)(module)
    sets = module[3][0].weight.detach().movedim(1, -1).reshape(-1, 4)
    assert set((sets != 0).sum(1).tolist()) == {2}
