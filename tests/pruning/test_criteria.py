"""Criteria by name: on tensors made by hand whose ranking is known, and their formulas by autograd."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from optimize.cli.options import CRITERIA as ON_THE_COMMAND_LINE
from optimize.data import Batch, Samples
from optimize.errors import Refused, UsageError
from optimize.frontend import capture
from optimize.program import Program
from optimize.pruning.criteria import Evidence, Name, score_layers
from optimize.pruning.groups import dependencies

torch.set_num_threads(1)


def program_of(*layers: nn.Module, shape: tuple[int, ...] = (2, 4, 4)) -> Program:
    return capture(nn.Sequential(*layers).double().eval(), (torch.randn(3, *shape, dtype=torch.float64),))


def ranked(program: Program, name: Any, **known: Any) -> list[int]:
    """Return the channels of the first layer, those that matter least first."""
    return torch.argsort(scored(program, name, **known), stable=True).tolist()


def scored(program: Program, name: Any, **known: Any) -> Tensor:
    found = dependencies(program)
    return score_layers(program, found, name, Evidence(**known))[found.groups[0].layers[0]]


def with_filters(*rows: list[float]) -> Program:
    first = nn.Conv2d(2, len(rows), 1)
    first.weight.data = torch.tensor(rows)[:, :, None, None]
    return program_of(first, nn.ReLU(), nn.Conv2d(len(rows), 3, 1))


def test_the_duplicate_goes_by_the_geometric_median_and_the_smallest_by_its_length() -> None:
    program = with_filters([3.0, 3.0], [0.0, 1.0], [3.0, 3.0], [-3.0, 2.0], [4.0, -3.0])
    assert ranked(program, "l1")[0] == ranked(program, "l2")[0] == 1
    assert set(ranked(with_filters([3.0, 3.0], [3.0, 3.0], [0.0, -5.0], [-7.0, 1.0]), "fpgm")[:2]) == {0, 1}
    assert ranked(with_filters([3.0, 3.0], [3.0, 3.0], [0.0, -5.0], [-7.0, 1.0]), "l1")[:2] == [2, 0]


def test_l1_and_l2_differ_where_weights_are_spread() -> None:
    program = with_filters([3.0, 0.0], [2.0, 2.0])
    assert ranked(program, "l1") == [0, 1] and ranked(program, "l2") == [1, 0]
    assert scored(program, "l1").tolist() == [3.0, 4.0] and scored(program, "l2").tolist() == [9.0, 8.0]


def test_slimming_reads_the_scale_whatever_its_sign() -> None:
    norm = nn.BatchNorm2d(4)
    norm.weight.data = torch.tensor([0.5, -2.0, 0.1, 1.0])
    program = program_of(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 1))
    assert ranked(program, "bn") == [2, 0, 3, 1]
    _, outcome = optimize.PruneChannels(0.5, criterion="bn").apply(with_filters([1.0, 2.0], [2.0, 3.0]))
    assert not outcome.rewrites and "the criterion 'bn' finds nothing" in outcome.skips[0].reason


def test_activations_are_counted_and_measured_behind_their_norm() -> None:
    norm = nn.BatchNorm1d(3)
    norm.bias.data, norm.running_mean = torch.tensor([0.0, -0.5, -0.9]), torch.zeros(3)
    first = nn.Linear(1, 3, bias=False)
    first.weight.data = torch.tensor([[1.0], [1.0], [8.0]])
    program = program_of(first, norm, nn.ReLU(), nn.Linear(3, 2), shape=(1,))
    data = [torch.linspace(-1, 1, 41, dtype=torch.float64)[:, None][part::3] for part in range(3)]
    values = torch.cat(data)
    activated = torch.relu(values @ torch.tensor([[1.0, 1.0, 8.0]]).double() / (1 + 1e-5) ** 0.5 + norm.bias.data)
    assert torch.allclose(scored(program, "apoz", data=data), (activated > 0).double().sum(0))
    assert torch.allclose(scored(program, "activation", data=data), activated.sum(0))
    assert ranked(program, "apoz", data=data) == [1, 2, 0] and ranked(program, "activation", data=data) == [1, 0, 2]


def labelled(net: nn.Module) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    torch.manual_seed(1)
    batches = [(torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(2)]
    return batches, functional.cross_entropy


def test_gradients_are_those_of_autograd_sample_by_sample() -> None:
    torch.manual_seed(0)
    first, norm = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5)
    norm.weight.data, norm.running_var = torch.rand(5) + 0.5, torch.rand(5) + 0.5
    net = nn.Sequential(first, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)).double().eval()
    batches, loss = labelled(net)
    program = capture(net, (batches[0][0],))
    wanted = {name: torch.zeros(5, dtype=torch.float64) for name in ("taylor", "hessian", "snip")}
    for x, y in ((x[place : place + 1], y[place : place + 1]) for x, y in batches for place in range(4)):
        net.zero_grad()
        gate = torch.ones(5, dtype=torch.float64, requires_grad=True)
        loss(net[2:](norm(first(x)) * gate[:, None, None]), y).backward()
        product = (first.weight * first.weight.grad).detach().flatten(1)
        wanted["taylor"] += gate.grad.square()
        wanted["hessian"] += product.square().sum(1)
        wanted["snip"] += product.abs().sum(1)
    for name, value in wanted.items():
        assert torch.allclose(scored(program, name, data=batches, loss=loss), value, rtol=1e-10), name
    before = [weight.requires_grad for weight in program.graph_module.parameters()]
    assert not any(before), "the program is left as it was"


def test_without_a_loss_it_is_the_change_of_the_outputs() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    program = program_of(first, last, shape=(3,))
    data = [torch.randn(64, 3, dtype=torch.float64)]
    found = scored(program, "taylor", data=data * 2)
    made = first(data[0])  # a linear network: without channel c its outputs change by made[:, c] * last.weight[:, c]
    exact = 2 * (made.square().sum(0) * last.weight.square().sum(0)).detach()
    assert torch.allclose(found, exact, rtol=0.5) and found.argsort().tolist() == exact.argsort().tolist()


def test_movement_keeps_what_moved_away_from_zero() -> None:
    program = with_filters([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    scores = {name: torch.zeros_like(value) for name, value in program.graph_module.named_parameters()}
    scores["0.weight"][:, 0, 0, 0] = torch.tensor([0.5, -2.0, 1.0])
    assert ranked(program, "movement", scores=scores) == [1, 0, 2]
    thin, _ = optimize.PruneChannels(0.34, criterion="movement", scores=scores).apply(program)
    assert thin.graph_module.get_parameter("0.weight").shape[0] == 2
    with pytest.raises(Refused, match=r"'0.weight' has weights of .* and there is none among the scores"):
        scored(program, "movement", scores={})
    with pytest.raises(Refused, match=r"a score is \[2\] among the scores"):
        scored(program, "movement", scores={"0.weight": torch.zeros(2)})


def test_chance_is_the_seeds() -> None:
    program = with_filters(*[[1.0, 1.0]] * 16)
    one, again, other = (ranked(program, "random", seed=seed) for seed in (0, 0, 1))
    assert one == again != other


@pytest.mark.parametrize("name", ["l1", "bn", "taylor", "random"])
@pytest.mark.parametrize("of", ["params", "macs", "channels"])
def test_no_layer_collapses_at_seventy_percent(name: Any, of: Any) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((2, 32), (32, 48), (48, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers[3].weight.data.mul_(1e-6)  # what would be emptied first
    layers[4].weight.data.fill_(1e-6)
    program = program_of(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))
    data = [torch.randn(8, 2, 4, 4, dtype=torch.float64)]
    cut = optimize.PruneChannels(0.7, of=of, criterion=name, calibration=data, compensated=False)
    thin, outcome = cut.apply(program)
    shares = [thin.graph_module.get_parameter(f"{at}.weight").shape[0] / width for at, width in
              ((0, 32), (3, 48), (6, 64))]  # fmt: skip
    assert min(shares) >= 0.1 and outcome.rewrites
    if of != "channels":
        key = {"params": "parameters", "macs": "macs"}[of]
        assert 0.2 <= getattr(thin.stats(), key) / getattr(program.stats(), key) <= 0.31


def test_a_share_of_nothing_is_no_matter_of_the_criterion() -> None:
    for options in ({}, {"criterion": "l1"}):
        _, outcome = optimize.PruneChannels(0.1, **options).apply(with_filters([1.0, 2.0], [2.0, 3.0]))
        assert any("a share of 0.1 of its 2 channels" in skip.reason for skip in outcome.skips), options


def test_data_makes_up_for_what_a_criterion_cuts() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).double().eval()
    data = torch.randn(256, 8, dtype=torch.float64)
    program = capture(net, (data[:2],))
    errors = []
    for compensated in (True, False):
        cut = optimize.PruneChannels(0.5, criterion="l1", calibration=[data], compensated=compensated)
        thin, outcome = cut.apply(program)
        errors.append(float((thin.run((data,))[0] - net(data).detach()).square().mean()))
        assert any("make up" in note for note in outcome.notes) == compensated
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"criterion": "l3"}, "no criterion 'l3'"),
        ({"criterion": "taylor"}, "reads what layers make of data, and there is none"),
        ({"criterion": "l1", "loss": functional.cross_entropy}, "'l1' reads weights"),
        ({"loss": functional.cross_entropy}, "gradients are of a loss"),
        ({"criterion": "snip", "loss": "cross_entropy"}, "function of outputs and labels"),
        ({"criterion": "l1", "scores": {}}, "scores are for criterion='movement'"),
    ],
)
def test_what_does_not_go_together_is_said(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        optimize.PruneChannels(0.5, **options).apply(with_filters([1.0, 2.0], [2.0, 3.0]))


def test_a_loss_that_is_none_and_data_without_labels_are_refused() -> None:
    program, data = with_filters([1.0, 2.0], [2.0, 3.0]), [torch.randn(2, 2, 4, 4, dtype=torch.float64)]
    with pytest.raises(Refused, match="no number that depends on the weights"):
        scored(program, "taylor", data=[(data[0], torch.zeros(2))], loss=lambda outputs, labels: 0.0)
    with pytest.raises(Refused, match="The loss of a criterion raised RuntimeError: "):
        scored(program, "taylor", data=[(data[0], torch.zeros(2))], loss=functional.cross_entropy)
    unlabelled = Samples("pictures", lambda: iter([Batch((data[0],))]))
    with pytest.raises(UsageError, match="reads labels, and 'pictures' has none"):
        scored(program, "taylor", data=unlabelled, loss=functional.cross_entropy)
    with pytest.raises(UsageError, match="has no labels"):
        scored(program, "taylor", data=data, loss=lambda outputs, labels: outputs.sum())
    with pytest.raises(Refused, match="no samples"):
        scored(program, "apoz", data=[])


def test_every_criterion_has_a_road_from_a_recipe() -> None:
    from optimize.recipe import PassEntry, parse

    for name in get_args(Name):
        text = {"passes": [{"PruneChannels": {"ratio": 0.5, "criterion": name}}], "targets": ["onnx"]}
        assert parse(text, source="test").passes[0].options["criterion"] == name
    made = optimize.PruneChannels(0.5, criterion="snip", loss="torch.nn.functional:cross_entropy")
    assert PassEntry.of(made).options == {
        "ratio": 0.5, "criterion": "snip", "loss": "torch.nn.functional:cross_entropy",
    }  # fmt: skip
    scored_by = optimize.PruneChannels(0.5, criterion="movement", scores={"a": torch.zeros(1)})
    assert "scores" not in PassEntry.of(scored_by).options


def test_the_command_names_every_criterion_that_needs_no_training() -> None:
    assert set(ON_THE_COMMAND_LINE) == {*get_args(Name)} - {"movement"}
