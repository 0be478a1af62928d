"""What ONNX has no operator for is computed by those it has, at any batch: files answer as the module."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import optimize
from optimize.errors import Refused
from optimize.targets.onnx_graph import taking_apart
from tests.nets import Called

TARGETS = {"onnx": ".onnx", "openvino": ".xml"}
LEVELS = torch.linspace(-2, 2, 7)


def volume(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], 1, 4, 3, 4)


def square(x: Tensor) -> Tensor:
    """Makes matrices ``[N, 3, 3]`` that have an inverse; the largest of a column is not on the diagonal."""
    return x.reshape(x.shape[0], 4, 12)[:, :3, :3] + 5 * torch.eye(3).roll(1, 0)


def positive(x: Tensor) -> Tensor:
    rows = x.reshape(x.shape[0], 4, 12)
    return rows @ rows.mT + torch.eye(4)


def spectral(x: Tensor) -> Tensor:
    """Keeps a few frequencies, as Fourier neural operators do it (arXiv 2010.08895)."""
    weight = torch.complex(torch.arange(4.0).reshape(2, 2, 1) - 1, torch.arange(4.0).reshape(2, 2, 1) / 3).expand(
        2, 2, 5
    )
    found = torch.fft.rfft(x.reshape(x.shape[0], 2, 24))
    kept = torch.zeros(x.shape[0], 2, 13, dtype=torch.complex64)
    kept[:, :, :5] = torch.einsum("bix,iox->box", found[:, :, :5], weight)
    return torch.fft.irfft(kept, n=24)


CASES: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(volume(x), (2, 2, 3)),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.reshape(x.shape[0], 4, 12), 5),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "adaptive_max_pool2d to one": lambda x: F.adaptive_max_pool2d(x, 1) + F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d with places": lambda x: F.adaptive_max_pool2d(x, (2, 2), return_indices=True),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(volume(x), 2),
    "aminmax": lambda x: torch.stack([*x.aminmax(dim=2)]) if x.dim() < 3 else x.aminmax(dim=2)[1] - x.aminmax(dim=2)[0],
    "bucketize": lambda x: torch.bucketize(x * 2, LEVELS, right=True),
    "cdist": lambda x: torch.cdist(x[:, 0], x[:, 1], p=2.0),
    "cdist by sums": lambda x: torch.cdist(x[:, 0], x[:, 1], p=1.0),
    "cholesky": lambda x: torch.linalg.cholesky(positive(x)),
    "copysign": lambda x: torch.copysign(x[:, 0], x[:, 1] - x[:, 1].relu() * 2),
    "cummax": lambda x: x.cummax(2),
    "cummin": lambda x: x.cummin(-1).values,
    "cumprod": lambda x: x.cumprod(3),
    "filters of a spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.complex(LEVELS[:3], LEVELS[4:]), n=4),
    "fmax": lambda x: torch.fmax(x[:, 0].log(), x[:, 1]),
    "Fourier transform of more": lambda x: torch.fft.fft2(x, s=(5, 6)).abs(),
    "Fourier neural operator": spectral,
    "grid_sample in space": lambda x: F.grid_sample(
        volume(x), x.reshape(x.shape[0], -1)[:, :24].reshape(-1, 2, 2, 2, 3).tanh(), align_corners=False
    ),
    "hypot": lambda x: torch.hypot(x[:, 0] * 1e25, x[:, 1] * 1e25) * 1e-25 + torch.hypot(x[:, 2], x[:, 2] * 0),
    "index_reduce": lambda x: torch.ones_like(x).index_reduce(2, torch.tensor([0, 2, 2, 1]), x, "amax"),
    "index_reduce to means": lambda x: x.index_reduce(2, torch.tensor([0, 2, 2, 1]), x * 3, "mean"),
    "inv": lambda x: torch.linalg.inv(square(x)),
    "kthvalue": lambda x: x.kthvalue(2, dim=1).values,
    "median": lambda x: x.median(dim=2),
    "median of a NaN": lambda x: torch.where(x > 1, x.log() * float("nan"), x).median(dim=2).values,
    "put": lambda x: x.put(torch.tensor([0, -1, 3]), torch.tensor([7.0, 8.0, 9.0])),
    "searchsorted for NaN": lambda x: torch.searchsorted(LEVELS, torch.where(x > 0, x, x.log()), right=True),
    "searchsorted": lambda x: torch.searchsorted(x.sort(dim=3).values, x * 2),
    "solve": lambda x: torch.linalg.solve(square(x), x.reshape(x.shape[0], 4, 12)[:, :3, 3:5]),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(
        torch.linalg.cholesky(positive(x)), x.reshape(x.shape[0], 4, 12), upper=False
    ),
}
#: OpenVINO reads none of what they are made of.
ONNX_ALONE = {"grid_sample in space"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_files_answer_as_the_module(case: str, target: str, tmp_path: Path) -> None:
    net = Called(lambda _, x: CASES[case](x)).eval()
    program = optimize.capture(net, (torch.randn(2, 3, 4, 4),))
    if target == "openvino" and case in ONNX_ALONE:
        with pytest.raises(Refused, match="OpenVINO cannot convert the model"):
            optimize.export(program, target, tmp_path / "net.xml")
        return
    runner = optimize.export(program, target, tmp_path / f"net{TARGETS[target]}").load(threads=1)
    for samples in (1, 3):
        x = torch.randn(samples, 3, 4, 4)
        wanted = net(x)
        for answer, value in zip(
            runner.run([x.numpy()]), [wanted] if isinstance(wanted, Tensor) else wanted, strict=True
        ):
            assert answer.shape == tuple(value.shape) and answer.dtype == value.numpy().dtype
            np.testing.assert_allclose(answer, value.numpy(), rtol=1e-3, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 12), count=st.integers(1, 12), seed=st.integers(0, 999))
def test_windows_are_those_of_torch(size: int, count: int, seed: int) -> None:
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(seed))
    cuts = [x[:, start:end].amax(1) for start, end in taking_apart.windows(size, count)]
    assert torch.equal(torch.stack(cuts, 1), F.adaptive_max_pool1d(x, count))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 9), ties=st.booleans(), lost=st.booleans(), seed=st.integers(0, 999))
def test_running_extremes_have_the_places_of_torch(size: int, ties: bool, lost: bool, seed: int) -> None:
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    x = (x * 2).round() if ties else x
    x[1, size // 2] = float("nan") if lost else 0.0
    for target in (torch.ops.aten.cummax.default, torch.ops.aten.cummin.default):
        for found, wanted in zip(taking_apart.APART[target](x, 1), target(x, 1), strict=True):
            assert torch.equal(found.nan_to_num(99), wanted.nan_to_num(99))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 6), seed=st.integers(0, 999), batch=st.sampled_from([(), (2,)]))
def test_matrices_are_solved_whatever_stands_on_the_diagonal(size: int, seed: int, batch: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(*batch, size, size, generator=draw, dtype=torch.float64)
    a.diagonal(dim1=-2, dim2=-1).zero_()
    a = a + 3 * torch.eye(size, dtype=torch.float64).roll(1, 0)
    b = torch.randn(*batch, size, 2, generator=draw, dtype=torch.float64)
    solved, *_ = taking_apart.APART[torch.ops.aten._linalg_solve_ex.default](a, b)
    bound = float(torch.linalg.cond(a).max()) * 1e-13
    assert torch.allclose(a @ solved, b, rtol=0, atol=max(bound, 1e-12))


def test_what_is_too_large_or_free_is_refused_by_name(tmp_path: Path) -> None:
    for net, x in (
        (Called(lambda _, x: torch.linalg.inv(x + 9 * torch.eye(40))), torch.randn(2, 40, 40)),
        (Called(lambda _, x: x.cummax(0).values), torch.randn(2, 3)),
        (Called(lambda _, x: F.adaptive_max_pool2d(x, (40, 40))), torch.randn(2, 1, 50, 50)),
    ):
        program = optimize.capture(net.eval(), (x,))
        with pytest.raises(Refused, match=r"ONNX (has no translation|lacks)|cannot be exported to ONNX"):
            optimize.export(program, "onnx", tmp_path / "net.onnx")


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize("target", [*TARGETS, "torchscript"])
@pytest.mark.parametrize("pool", [nn.AvgPool2d, nn.AvgPool3d])
def test_means_of_a_divisor_of_their_own(pool: type[nn.Module], target: str, is_free: bool, tmp_path: Path) -> None:
    shape = (2, 3, 7, 8) if pool is nn.AvgPool2d else (2, 3, 7, 8, 6)
    dynamic = {"input": {2: "height"}} if is_free else None
    for options in ({}, {"padding": 1}, {"padding": 1, "count_include_pad": False}, {"ceil_mode": True, "padding": 1}):
        net = pool(3, 2, divisor_override=5, **options).eval()
        program = optimize.capture(net, (torch.randn(shape),), dynamic=dynamic)
        path = tmp_path / f"net{TARGETS.get(target, '.pt')}"
        if is_free and "ceil_mode" in options and target in TARGETS:
            with pytest.raises(Refused, match=r"no translation of the operator aten.avg_pool\dd as '\w+' has it"):
                optimize.export(program, target, path)
            continue
        x = torch.randn(3, *shape[1:])
        (answer,) = optimize.export(program, target, path).load(threads=1).run([x.numpy()])
        np.testing.assert_allclose(answer, net(x).numpy(), rtol=1e-4, atol=1e-5)


def test_what_batch_norm_has_counted_is_refused(tmp_path: Path) -> None:
    def counted(_: nn.Module, x: Tensor) -> Tensor:
        made, mean, _ = torch.native_batch_norm(x, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
        return made + mean[:, None]

    program = optimize.capture(Called(counted).eval(), (torch.randn(2, 3, 4),))
    with pytest.raises(Refused, match=r"no translation of the operator aten\._native_batch_norm_legit"):
        optimize.export(program, "onnx", tmp_path / "net.onnx")
