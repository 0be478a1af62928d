"""TorchScript: what is compiled is read, operator by operator; what reaches out or never ends is refused by name."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimize.errors import Refused
from optimize.load import script
from optimize.load.identify import Kind, identify
from optimize.load.taking import look
from tests.fuzzing import zips
from tests.load.files import load, rewritten

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def edited(tmp_path: Path, change: Callable[[str, bytes], bytes], module: nn.Module | None = None) -> Path:
    torch.jit.script(module or nn.Sequential(nn.ReLU())).save(tmp_path / "good.pt")
    return rewritten(tmp_path / "good.pt", tmp_path / "m.pt", change)


def with_line(tmp_path: Path, line: str) -> Path:
    """Return a file whose code runs one more line before it returns."""

    def edit(name: str, data: bytes) -> bytes:
        return data.replace(b"return ", line.encode() + b"\n    return ", 1) if name.endswith(".py") else data

    return edited(tmp_path, edit)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("torch.save(input, 'MARKER')", "aten::save"),
        ("torch . save(input, 'MARKER')", "aten::save"),
        ("ops.aten.save(input, 'MARKER')", "aten::save"),
        # added to something, for torch takes out of a method what nothing reads: that is never run
        ("a = torch.add_(input, torch.from_file('MARKER', True, 4))", "aten::from_file"),
        ("a = torch.add_(input, ops.aten.from_file('MARKER', True, 4))", "aten::from_file"),
        (
            "a = torch.add_(input, ops.inductor._reinterpret_tensor(input, [1000], [1], 0))",
            "inductor::_reinterpret_tensor",
        ),
        (
            "a = torch.add_(input, ops.inductor._alloc_from_pool(input, 999999, 6, [1], [1]))",
            "inductor::_alloc_from_pool",
        ),
        ("torch.manual_seed(0)", "aten::manual_seed"),
        ("print(1)", "prim::Print"),
    ],
)
def test_operators_that_reach_out(tmp_path: Path, marker: Path, line: str, match: str) -> None:
    path = with_line(tmp_path, line.replace("MARKER", str(marker)))
    with pytest.raises(Refused, match=f"{match}|torch cannot read") as caught:
        load(path)
    assert "--trust" in caught.value.hint or "torch cannot read" in caught.value.what


class While(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool(x.sum() < 1e30):
            x = x + 0
        return x


class Count(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 << 40):
            x = x + 1
        return x


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(10_000):
            for _ in range(10_000):
                x = x + 1
        return x


class FromData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.sum())):
            x = x + 1
        return x


class OverSteps(nn.Module):
    """What ordinary recurrent code does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x[0])
        for step in range(x.size(0) - 1):
            for _ in range(3):
                total = total + x[step]
        for part in x.unbind(0):
            total = total + part
        return total


@pytest.mark.parametrize(("module", "match"), [(While, "ends when its data says so"), (FromData, "ends when its data"),
                                               (Count, "loops of"), (Nested, "loops of")])  # fmt: skip
def test_loops_that_may_not_end(tmp_path: Path, module: type[nn.Module], match: str) -> None:
    torch.jit.script(module()).save(tmp_path / "m.pt")
    with pytest.raises(Refused, match=match):
        load(tmp_path / "m.pt")


def test_loops_over_sizes_are_ordinary(tmp_path: Path) -> None:
    torch.jit.script(OverSteps()).save(tmp_path / "m.pt")
    x = torch.randn(4, 3)
    torch.testing.assert_close(load(tmp_path / "m.pt").module(x), OverSteps()(x))


class WritesWhenLoaded(nn.Module):
    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.training = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.target, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.target = state[0]
        self.training = state[1]
        torch.save(torch.zeros(1), state[0])


def test_a_file_that_writes_when_it_is_loaded(tmp_path: Path) -> None:
    """Loading runs it before anything can be read; the confined process keeps it from writing."""
    marker = tmp_path / "marker"
    torch.jit.script(WritesWhenLoaded(str(marker))).save(tmp_path / "m.pt")
    marker.unlink(missing_ok=True)
    with pytest.raises(Refused):
        look(tmp_path / "m.pt", Kind.TORCHSCRIPT)
    assert not marker.exists()
    with pytest.raises(Refused, match="computes while it is loaded"):  # here, without walls
        load(tmp_path / "m.pt")
    assert not marker.exists()


@pytest.mark.parametrize(("plain", "other"), [("", ""), ("m/code/", "m/CODE/"), ("m/.data", "other/.data")])
def test_code_that_lies_where_only_torch_looks(tmp_path: Path, plain: str, other: str) -> None:
    """torch takes the folder of the first member, and finds names in any case."""
    marker = tmp_path / "marker"
    torch.jit.script(WritesWhenLoaded(str(marker))).save(tmp_path / "m.pt")
    members = zips.read((tmp_path / "m.pt").read_bytes())
    for member in members:
        member.name = member.name.replace(plain.encode(), other.encode())
    (tmp_path / "m.pt").write_bytes(zips.write(members))
    with pytest.raises(Refused, match="computes while" if plain == other else "spelt as torch|in one folder"):
        script.read(tmp_path / "m.pt", "m.pt")
    assert not marker.exists()


@pytest.mark.parametrize(("plain", "other"), [(".py", ".PY"), ("code/", "CODE/")])
def test_members_in_another_case(tmp_path: Path, marker: Path, plain: str, other: str) -> None:
    """torch's reader of archives takes no notice of case; what it finds is read as compiled, so neither do we."""
    source = with_line(tmp_path, f"torch.save(input, '{marker}')")
    path = tmp_path / "renamed.pt"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename.replace(plain, other), old.read(info.filename))
    with pytest.raises(Refused, match=r"aten::save|torch cannot read|spelt as torch"):
        look(path, identify(path))


def test_what_torch_writes_opens(tmp_path: Path) -> None:
    nets: list[Any] = [
        nn.LSTM(4, 4, 2, bidirectional=True),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"), nn.Upsample(scale_factor=2)),
        nn.EmbeddingBag(4, 4),
    ]
    for net in nets:
        torch.jit.script(net.eval()).save(tmp_path / "m.pt")
        assert load(tmp_path / "m.pt").kind == "torchscript"
