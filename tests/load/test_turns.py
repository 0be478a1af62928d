"""How much a TorchScript file executes is bounded before it runs: by attributes, arguments, sizes, lists and calls."""

from pathlib import Path

import pytest
import torch
from torch import nn

from optimize import bounds
from optimize.errors import Refused
from optimize.load.magnitudes import magnitude
from tests.load.files import load, rewritten

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = 1 << 30

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + 1
        return x


class ByAttributeThatIsSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times = self.times * 1000
        for _ in range(self.times):
            x = x + 1
        return x


class ByArgument(nn.Module):
    def more(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = x + 1
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(x, 1 << 30)


class ByDefault(nn.Module):
    def forward(self, x: torch.Tensor, times: int = 1 << 30) -> torch.Tensor:
        for _ in range(times):
            x = x + 1
        return x


class ByProduct(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.size(0) * x.size(1) * 4096):
            x = x + 1
        return x


class BySum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(len(x) + (1 << 40)):
            x = x + 1
        return x


class ByNesting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.size(0)):
            for _ in range(x.size(0)):
                for _ in range(x.size(0)):
                    x = x + 1
        return x


class OverCalls(nn.Module):
    def once(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.size(0)):
            x = x + 1
        return x

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4096):
            x = self.once(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.size(0)):
            x = self.twice(x)
        return x


class ByView(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.mean().expand(1 << 40).size(0)):
            x = x + 1
        return x


class ByNothing(nn.Module):
    """A tensor without values has sizes all the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(torch.zeros(0, 1 << 40).size(1)):
            x = x + 1
        return x


class ByFlattening(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.mean().expand(1000, 1000, 1000, 1000).reshape(-1)
        for _ in range(wide.size(0)):
            x = x + 1
        return x


class ByDoubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.flatten()[:1]
        for _ in range(40):
            wide = wide[:1].expand(wide.size(0) * 2)
        for _ in range(wide.size(0)):
            x = x + 1
        return x


class ByCounting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = 1
        for _ in range(40):
            times = times + times
        for _ in range(times):
            x = x + 1
        return x


class BySquaring(nn.Module):
    """A number of 2^60 digits, which is not computed to find that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = x.size(0) + 2
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        times = times * times
        for _ in range(times):
            x = x + 1
        return x


class ByList(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = [1]
        for _ in range(100_000):
            held.append(1)
        for _ in range(len(held)):
            for _ in held:
                x = x + 1
        return x


class ByListOfAnother(nn.Module):
    def fill(self, held: list[int]) -> None:
        for _ in range(100_000):
            held.append(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = [1]
        self.fill(held)
        for _ in held:
            for _ in held:
                x = x + 1
        return x


class ByListInAList(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = [1]
        outer = [inner]
        for _ in range(100_000):
            outer[0].append(1)
        for _ in inner:
            for _ in inner:
                x = x + 1
        return x


class ByListThatIsKept(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = [1]
        for turn in range(40):
            if turn == 3:
                held = [2]
            held.extend(held)
        for _ in held:
            x = x + 1
        return x


class ByResizing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = torch.zeros(1)
        for _ in range(40):
            held.unsqueeze_(0)
        torch.zeros([0, 1 << 40], out=held)
        for _ in range(held.size(1)):
            x = x + 1
        return x


class ByTraining(nn.Module):
    """What is False in the file, and set while it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.training = x.size(0) > 0
        if self.training:
            for _ in range(1 << 40):
                x = x + 1
        return x


class ByRepeating(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.flatten()[:1]
        for _ in range(40):
            wide = wide[:1].repeat(wide.size(0) * 2)
        for _ in range(wide.size(0)):
            x = x + 1
        return x


class ByTelling(nn.Module):
    """A number that is told to an operator of which no more is known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(torch.hann_window(1 << 30).size(0)):
            x = x + 1
        return x


class ByASmallStep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(torch.arange(0.0, 1.0, 1e-9).size(0)):
            x = x + 1
        return x


class ByDimensions(nn.Module):
    """Torch has no limit of dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten()[:1]
        for _ in range(20):
            x = torch.tensordot(x, x, 0)
        for _ in range(x.dim()):
            for _ in x.size():
                x = x + 1
        return x


class ByFlatteningSome(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.mean().expand(2, 1000, 1000, 1000).flatten(1, -1).size(1)):
            x = x + 1
        return x


ATTACKS = (
    ByAttribute, ByAttributeThatIsSet, ByArgument, ByDefault, ByProduct, BySum, ByNesting, OverCalls, ByView, ByNothing,
    ByFlattening, ByDoubling, ByCounting, BySquaring, ByList, ByListOfAnother, ByListInAList, ByListThatIsKept,
    ByResizing, ByTraining, ByRepeating, ByTelling, ByASmallStep, ByDimensions, ByFlatteningSome,
)  # fmt: skip


@pytest.mark.parametrize("module", ATTACKS)
def test_what_may_run_for_too_long_is_refused(module: type[nn.Module], tmp_path: Path) -> None:
    torch.jit.script(module()).save(tmp_path / "m.pt")
    with pytest.raises(
        Refused, match=r"has loops of \d+ turns|ends when its data says so|executes more than"
    ) as caught:
        load(tmp_path / "m.pt")
    assert "--trust" in caught.value.hint


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_margins_of_packed_weights_are_counted() -> None:
    packed = torch.jit.script(torch.ao.nn.quantized.Conv1d(2, 3, 3, padding=1 << 30))._c.getattr("_packed_params")
    assert magnitude(packed).largest == 1 << 30


def test_functions_that_call_each_other_on_many_levels_are_counted(tmp_path: Path) -> None:
    """2^60 calls of methods of one module, none of which is made."""
    torch.jit.script(ByArgument()).save(tmp_path / "good.pt")
    levels = [f"  def f{n}(self: T, x: Tensor) -> Tensor:\n    return (self).f{n - 1}((self).f{n - 1}(x, ), )\n"
              for n in range(1, 61)]  # fmt: skip
    first = "  def f0(self: T, x: Tensor) -> Tensor:\n    return torch.add(x, 1)\n"
    last = "  def forward(self: T, x: Tensor) -> Tensor:\n    return (self).f60(x, )\n"

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("test_turns.py"):
            return data
        head = data.decode().partition("  def ")[0]
        return (head + "".join([first, *levels, last]).replace("T,", f"{own},")).encode()

    own = "__torch__.tests.load.test_turns.ByArgument"
    rewritten(tmp_path / "good.pt", tmp_path / "m.pt", change)
    with pytest.raises(Refused, match=f"executes more than {bounds.MOST_STEPS} operators"):
        load(tmp_path / "m.pt")


class Steps(nn.Module):
    """An LSTM of one's own: states and outputs in a list, over two layers and both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(4, 4), nn.LSTMCell(4, 4)])
        self.hidden, self.repeats = 4, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in self.cells:
            parts = x.unbind(0)
            h = c = torch.zeros(x.size(1), self.hidden)
            outputs: list[torch.Tensor] = []
            for step in range(len(parts)):
                h, c = cell(parts[len(parts) - 1 - step], (h, c))
                outputs += [h]
            x = torch.stack(outputs)
        for _ in range(self.repeats):
            for part in outputs:
                x = x + part
        return x


class Recognizer(nn.Module):
    """Features of a picture, read from left to right."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.cell = nn.GRUCell(8 * 4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = x.view(x.size(0), x.size(1) * x.size(2), x.size(3)).permute(2, 0, 1)
        h = torch.zeros(x.size(1), 8)
        for step in range(x.size(0)):
            h = self.cell(x[step], h)
        return h


class Numbered(nn.Module):
    """Layers by number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.skip = [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            if place not in self.skip:
                x = layer(x)
        for place in range(len(self.layers)):
            x = x * place
        return x


class Gridded(nn.Module):
    """Two loops over the sizes of what was made larger by operators of which little is known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.roll(nn.functional.grid_sample(x, x.permute(0, 2, 3, 1), align_corners=False), 1, 2)
        total = torch.zeros(x.size(0))
        for row in range(grid.size(2)):
            for column in range(grid.size(3)):
                total = total + grid[:, 0, row, column] * row - (column % 3)
        return total


class Flattened(nn.Module):
    """Columns of a picture, height and channels laid together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cell = nn.Conv2d(2, 4, 3, padding=1), nn.GRUCell(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.conv(x).flatten(1, 2).permute(2, 0, 1)
        h = torch.zeros(x.size(0), 8)
        for step in range(columns.size(0)):
            h = self.cell(columns[step], h)
        return h


class Named(nn.Module):
    """Features by name, resized to the picture; what is done in training alone loops over data."""

    def features(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        found["out"] = torch.sigmoid(nn.functional.max_pool2d(x, 2))
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for _ in range(int(x.sum())):
                x = x + 1
        found = self.features(x)["out"]
        return nn.functional.interpolate(found, size=x.shape[-2:], mode="bilinear", align_corners=False)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Steps, (5, 2, 4)), (Recognizer, (2, 1, 8, 12)), (Numbered, (2, 4)), (Gridded, (2, 2, 4, 4)),
        (Flattened, (2, 2, 4, 5)), (Named, (2, 2, 4, 4)),
    ],
)  # fmt: skip
def test_ordinary_loops_open(module: type[nn.Module], shape: tuple[int, ...], tmp_path: Path) -> None:
    net, x = module().eval(), torch.randn(shape)
    torch.jit.script(net).save(tmp_path / "m.pt")
    torch.testing.assert_close(load(tmp_path / "m.pt").module(x), net(x))
