"""TorchScript that branches by how many samples there are, and scripts with a ``with``."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optimize.errors import Refused
from optimize.load import ModelSource
from optimize.load.capturing import Capturing
from optimize.load.opening import capture_source
from optimize.program import Program


class Chunked(nn.Module):
    """Scales what comes in more samples than it likes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.line, self.most = nn.Linear(8, 4), most

    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) > self.most:
            return self.line(x) * 2
        return self.line(x)


class Counted(nn.Module):
    """Computes with the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.size(0) // 3 + 1)


class Chosen(nn.Module):
    """Chooses by the number of samples, without a branch."""

    def forward(self, x: Tensor) -> Tensor:
        return [x, x * 2][int(x.size(0) > 3)]


class Elements(nn.Module):
    """Branches by the number of elements."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > 500:
            x = x * 2
        return x


class Behind(nn.Module):
    """Counts the batch from the end."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] > 64:
            x = x * 2
        return x


class Bounded(nn.Module):
    """Branches, and refuses some of what it branches for."""

    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) > 32:
            x = x * 2
            if x.size(0) > 4000:
                raise ValueError("too many")
        return x


class Wide(nn.Module):
    """Asks for a size that is no batch, and whether there is a sample at all."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 100:
            x = x * 2
        if x.size(0) == 0:
            raise ValueError("nothing to do")
        with torch.no_grad():
            x = x + 1
        return self.line(x)


def saved(module: nn.Module, path: Path) -> Path:
    torch.jit.script(module.eval()).save(str(path))
    return path


def captured(path: Path, how: Capturing = Capturing()) -> Program:  # noqa: B008 - it never changes
    return capture_source(ModelSource.of(str(path)), lambda _: [torch.randn(how.static_batch or 2, 8)], how).program


@pytest.mark.parametrize("most", [4, 16, 100])
def test_a_branch_by_the_batch_leaves_it_fixed(most: int, tmp_path: Path) -> None:
    path = saved(Chunked(most), tmp_path / "model.pt")
    with pytest.raises(Refused, match=r"computes by its batch, and otherwise with \d+ samples than with 2"):
        captured(path)
    assert captured(path, Capturing(static_batch=1)).batch is None


@pytest.mark.parametrize("kind", [Counted, Chosen, Elements, Behind, Bounded], ids=lambda kind: kind.__name__)
def test_a_number_of_samples_that_decides_anything_leaves_it_fixed(kind: type[nn.Module], tmp_path: Path) -> None:
    path = saved(kind(), tmp_path / "model.pt")
    with pytest.raises(Refused, match=r"computes by its batch, and otherwise with \d+ samples than with 2"):
        captured(path)
    assert captured(path, Capturing(static_batch=1)).batch is None


def test_other_branches_and_a_with_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Wide().eval(), torch.randn(9, 8)
    program = captured(saved(net, tmp_path / "model.pt"))
    assert program.batch == 2
    torch.testing.assert_close(program.run((x,))[0], net(x))


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        text = "aaaaaaaa"
        for _ in range(60):
            text = text.replace("a", "aa")
        return x + len(text)


def test_a_text_that_doubles_is_refused_before_it_runs(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="aten::replace"):
        captured(saved(Doubling(), tmp_path / "model.pt"))
