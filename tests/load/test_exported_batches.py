"""Exported programs whose file fixes or bounds its batch, and regions in them whose values are called alike."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from optimize.errors import Refused
from optimize.frontend_graphs import capture_exported
from optimize.program import Program
from tests.load.files import load, rewritten


class Centred(nn.Module):
    """Computes with the number of its samples, which is a number in an exported graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.sum(0) / x.shape[0]


class Branching(nn.Module):
    """Computes otherwise with few samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3


class Apart(nn.Module):
    """Answers for each sample by itself, with states along the second dimension and a number of the network's own."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.line(x)
        return found, found.transpose(0, 1), self.scale * 2


class Regions(nn.Module):
    """Has regions without gradients, whose values torch calls as those of the graph around them."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            with torch.no_grad():
                low, high = torch.split(x, 2, 1)
                x = torch.cat([high * 2, low + 1], 1)
                most, _ = x.max(1, keepdim=True)
            x = self.line(x) / most.abs()
        return x


def captured(module: nn.Module, inputs: tuple[Tensor, ...], dims: object, folder: Path | None) -> Program:
    """Return what is captured of an exported module, read from its file where there is a folder for one."""
    exported = torch.export.export(module.eval(), inputs, dynamic_shapes=dims)  # type: ignore[arg-type]
    if folder is None:
        return capture_exported(exported)
    torch.export.save(exported, folder / "p.pt2")
    found = load(folder / "p.pt2").captured()
    assert found is not None
    return found


CASES = {
    "for each sample by all of its batch of 3": (Centred(), (torch.rand(3, 4),), None),
    "takes 5..100 samples, and files take one": (Branching(), (torch.rand(8, 4),), ({0: Dim("some", min=5, max=100)},)),
}


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("told", CASES)
def test_a_batch_that_decides_answers_stays_as_the_file_has_it(told: str, from_file: bool, tmp_path: Path) -> None:
    module, inputs, dims = CASES[told]
    program = captured(module, inputs, dims, tmp_path if from_file else None)
    assert program.batch is None and len(program.notes) == 1 and told in program.notes[0]
    assert torch.equal(program(*inputs), module(*inputs))


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_fixed_batch_is_freed_where_samples_are_answered_apart(samples: int, from_file: bool, tmp_path: Path) -> None:
    module = Apart()
    program = captured(module, (torch.rand(samples, 3),), None, tmp_path if from_file else None)
    assert program.batch is not None and not program.notes
    for found, want in zip(program(torch.ones(5, 3)), module(torch.ones(5, 3)), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("from_file", [False, True])
def test_a_free_batch_is_free_within_its_range(from_file: bool, tmp_path: Path) -> None:
    dims = ({0: Dim("some", max=100)},)
    program = captured(Centred(), (torch.rand(3, 4),), dims, tmp_path if from_file else None)
    assert program.free["batch"].most == 100 and torch.equal(program(torch.eye(4)), Centred()(torch.eye(4)))
    assert [note[:23] for note in program.notes] == ["'batch' may be 100 at m"]


def test_which_first_dimension_is_fixed_is_told(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, y.sum(1)

    inputs = (torch.rand(3, 4), torch.rand(5, 4))
    program = captured(Two(), inputs, ({0: Dim("one")}, {0: Dim("other")}), tmp_path)
    assert program.notes == ["Free in the exported graph, fixed here to the example's size: dimension 0 of 'y'."]


def test_the_limits_of_an_input_that_stays_fixed_do_not_bind_the_batch(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, rows.sum(0)

    dims = ({0: Dim("some", max=50)}, {0: Dim("rows", max=7)})
    program = captured(Two(), (torch.rand(3, 4), torch.rand(5, 4)), dims, tmp_path)
    assert program.free["batch"].most == 50 and program.dynamic[1] == {}


def test_a_program_without_example_inputs_is_told_so(tmp_path: Path) -> None:
    exported = torch.export.export(Apart(), (torch.rand(2, 3),))
    exported._example_inputs = None  # as torch.export.save writes an empty member
    torch.export.save(exported, tmp_path / "p.pt2")
    with pytest.raises(Refused, match="holds no example inputs") as caught:
        load(tmp_path / "p.pt2").captured()
    assert "--trust" not in str(caught.value)


def test_a_weight_that_is_a_constant_too_is_refused(tmp_path: Path) -> None:
    net = Apart()
    net.register_buffer("held", torch.ones(()), persistent=False)
    torch.export.save(torch.export.export(net, (torch.rand(2, 3),)), tmp_path / "p.pt2")

    def both(name: str, data: bytes) -> bytes:
        return data.replace(b'"held"', b'"scale"') if name.endswith("model_constants_config.json") else data

    with pytest.raises(Refused, match="is a weight and a constant"):
        load(rewritten(tmp_path / "p.pt2", tmp_path / "both.pt2", both))


def test_values_of_regions_are_those_of_their_own_names(tmp_path: Path) -> None:
    net, x = Regions(), torch.rand(4, 4)
    torch.testing.assert_close(captured(net, (x,), None, tmp_path)(x), net(x))
