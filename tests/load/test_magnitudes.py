"""What bounds the loops of TorchScript: sizes and numbers by a rule of each operator, and none without a rule."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optimize import sandbox
from optimize.errors import Refused
from optimize.load.magnitudes import Magnitude, magnitude, nodes, of_operator, type_name
from tests.load.files import load, rewritten

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning"
)
_DOUBLED = "    n = torch.arange(-n, n).size(0)\n" * 40
_DIAGONAL = "    n = torch.size(torch.diag(torch.expand(torch.mean(x), [n]), n), 0)\n" * 40
_CHUNKS = "    n = torch.len(torch.chunk(torch.zeros([0]), 1073741824))\n"
_CAT = "    n = torch.size(torch.cat(torch.mul([torch.unsqueeze(torch.zeros([]), 0)], 1073741824)), 0)\n"
_CROSSED = '    y = torch.einsum("a...,b...->ab...", [y, y])\n' * 10
#: Lines that make ``n`` larger than the rules once said, from the number 1000 or the text "999999999999".
NUMBERS = {
    "int of a text": "    n = int(self.text)\n",
    "float of a text": "    n = int(float(self.text))\n",
    "quotient": "    n = int(torch.floordiv(n, 1.0e-12))\n",
    "arange": _DOUBLED.replace("torch.arange(-n, n).size(0)", "torch.size(torch.arange(torch.neg(n), n), 0)"),
    "pdist": "    n = torch.size(torch.pdist(torch.expand(torch.mean(x), [20000, 1])), 0)\n",
    "diag": _DIAGONAL,
    "chunks": _CHUNKS,
    "cat of a number": _CAT,
    "rangelist": "    n = torch.mul(torch.len(ops.prim.rangelist(100000)), 1000)\n",
    "default": '    d = annotate(Dict[str, int], {})\n    n = ops.aten.pop(d, "a", torch.mul(n, 1000000))\n',
    "list times": "    l = [1]\n    l0 = ops.aten.mul_(l, 1073741824)\n    n = torch.len(l)\n",
    "size that is set": "    l = [1]\n    l0 = torch._set_item(l, 0, -1)\n"
                        "    n = torch.size(torch.reshape(torch.expand(torch.mean(x), [20000, 20000]), l), 0)\n",
    "einsum": "    y = torch.zeros([1, 1])\n" + _CROSSED + "    n = torch.mul(torch.dim(y), 9000000)\n",
    "inner": "    y = torch.ones([2, 2, 2, 2, 2, 2, 2, 2])\n"
             + "    y = torch.inner(y, y)\n" * 2 + "    n = torch.size(torch.flatten(y), 0)\n",
    "complex": "    n = int(ops.prim.abs(self.imaginary))\n",
}  # fmt: skip


class Counts(nn.Module):
    """Loops over a number; the tests write what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.number, self.imaginary = "999999999999", 1000, 1e12j

    def forward(self, x: Tensor) -> Tensor:
        n = self.number
        for _ in range(n):
            x = x + 1
        return x


def written(folder: Path, lines: str, before: str = "") -> Path:
    """Return a file of `Counts` with lines behind the number, and functions of its own."""
    torch.jit.script(Counts()).save(folder / "good.pt")
    first = "    number = self.number\n"

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith(".py"):
            return data
        assert first in data.decode()
        return (before + data.decode().replace(first, f"    n = self.number\n{lines}    number = n\n")).encode()

    return rewritten(folder / "good.pt", folder / "m.pt", change)


def test_a_number_that_the_file_gives_opens(tmp_path: Path) -> None:
    assert load(written(tmp_path, "    n = torch.add(n, 1)\n")).kind == "torchscript"


@pytest.mark.parametrize("lines", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_passed_the_bounds(lines: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has loops of \d+ turns|ends when its data says so") as caught:
        load(written(tmp_path, lines))
    assert "--trust" in caught.value.hint


def test_a_function_called_as_what_restores_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sets attributes while a file is loaded counts as the file; a function of that name is called later."""
    own = "__torch__.tests.load.test_magnitudes.Counts"
    before = f"def __setstate__(m: {own}) -> NoneType:\n  m.number = 999999999999\n  return None\n"
    path = written(tmp_path, "    s = __torch__.__setstate__(self, )\n    n = self.number\n")

    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("good/code/__torch__.py", before)
    monkeypatch.setattr(sandbox, "is_write_protected", lambda: True)
    with pytest.raises(Refused, match="calls '__setstate__'"):
        load(path)


_PROJECTED = [torch.ones(4, 6), torch.ones(4, 9), torch.ones(9, 1)]
X, Y, V = torch.ones(3, 4, 6), torch.ones(2, 3, 8, 8), torch.ones(5)
CALLS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "matmul": (torch.matmul, (X, X.transpose(1, 2))),
    "outer": (torch.outer, (V, V)),
    "inner": (torch.inner, (X, X)),
    "einsum": (lambda x, y: torch.einsum("abc,d->abcd", x, y), (X, V)),
    "tensordot": (lambda x: torch.tensordot(x, x, 0), (X,)),
    "cat": (lambda x: torch.cat([x, x, x], 1), (X,)),
    "dstack": (lambda x: torch.dstack([x.sum(), x.sum()]), (X,)),
    "stack": (lambda x: torch.stack([x] * 9), (X,)),
    "block": (lambda x: torch.block_diag(x, x, x), (X[0],)),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), (V, V[:2])),
    "chunk": (lambda x: x.chunk(3, 1), (X,)),
    "split": (lambda x: x.split([1, 0, 0, 0, 0, 0, 0, 2], 0), (X,)),
    "repeat": (lambda x: x.repeat(2, 3, 4, 5), (X,)),
    "conv": (lambda x: nn.functional.conv2d(x, torch.ones(9, 3, 1, 1), padding=7), (Y,)),
    "transposed": (lambda x: nn.functional.conv_transpose2d(x, torch.ones(3, 9, 5, 5), stride=4, dilation=3), (Y,)),
    "interpolate": (lambda x: nn.functional.interpolate(x, scale_factor=3.5), (Y,)),
    "shuffle": (lambda x: nn.functional.pixel_shuffle(x.repeat(1, 3, 1, 1), 3), (Y,)),
    "pool": (lambda x: nn.functional.max_pool2d(x, 2, return_indices=True), (Y,)),
    "adaptive": (lambda x: nn.functional.adaptive_avg_pool2d(x, 20), (Y,)),
    "pad": (lambda x: nn.functional.pad(x, (1, 2, 3, 4)), (Y,)),
    "flatten": (lambda x: x.flatten(1), (X,)),
    "unfold": (lambda x: x.unfold(2, 2, 1), (X,)),
    "grid": (lambda x: nn.functional.affine_grid(x, [3, 1, 9, 9], align_corners=False), (torch.ones(3, 2, 3),)),
    "arange": (lambda x: torch.arange(-x.size(0), x.size(0) * 2, 1), (V,)),
    "diag": (lambda x: torch.diag(x, 7), (V,)),
    "spectrum": (lambda x: torch.stft(x, 4, 2, return_complex=True), (torch.ones(16),)),
    "inverse": (lambda x: torch.fft.irfft(x), (X,)),
    "pairs": (lambda x: torch.view_as_real(torch.complex(x, x)), (X.sum(),)),
    "embedding": (lambda x: nn.functional.embedding(x.long(), torch.ones(2, 7)), (X,)),
    "recurrent": (lambda x: nn.RNN(6, 5, bidirectional=True)(x), (X,)),
    "projected": (lambda x: torch.lstm(x, [torch.zeros(2, 4, 9), torch.zeros(2, 4, 1)], _PROJECTED * 2,
                                       False, 1, 0.0, False, True, False), (X,)),
    "attention": (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), (X,)),
    "losses": (lambda x: nn.functional.cross_entropy(x, x, reduction="none"), (X,)),
    "where": (lambda x: torch.where(x > 1, x, x * 2), (X,)),
    "copies": (lambda x: torch.zeros_like(x).index_add(0, torch.tensor([1]), x[:1]), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_larger_than_its_rule_says(name: str) -> None:
    function, inputs = CALLS[name]
    traced = torch.jit.trace(function, inputs, check_trace=False)
    seen = 0
    for node in nodes(traced.graph):
        given = [(value, _size(value)) for value in node.inputs()]
        if node.kind().startswith("prim::") or any(size is None for _, size in given):
            continue
        bound = of_operator(node, [(value, size) for value, size in given if size is not None])
        for value in node.outputs():
            parts = [
                part for use in value.uses() if use.user.kind() == "prim::ListUnpack" for part in use.user.outputs()
            ]
            assert len(parts) <= bound.length
            for found in filter(None, map(_size, parts or [value])):
                assert found.largest <= bound.largest and found.rank <= bound.rank, node
                seen += 1
    assert seen


def _size(value: object) -> Magnitude | None:
    """Return the magnitude of a traced value; None where the trace does not say it."""
    node = value.node()  # type: ignore[attr-defined]
    if type_name(value) == "Tensor":
        sizes = value.type().sizes()  # type: ignore[attr-defined]
        return None if sizes is None else magnitude(torch.empty(sizes, device="meta"))
    if node.kind() == "prim::Constant":
        return magnitude(value.toIValue())  # type: ignore[attr-defined]
    if node.kind() == "prim::ListConstruct":
        parts = [_size(part) for part in node.inputs()]
        held = [part for part in parts if part is not None]
        return Magnitude(*map(max, zip(Magnitude(0, len(parts)), *held, strict=True))) if held == parts else None
    return None
