"""Calibration data and weights as they should not be: a clear refusal, or answers of the file near the float ones."""

import functools
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimize
from optimize.errors import OptimizeError, Refused, UsageError
from tests.cpus import HAS_VNNI

Typed = Callable[..., subprocess.CompletedProcess[str]]
INFINITY, NAN = float("inf"), float("nan")


def images(samples: int) -> Tensor:
    return torch.rand(samples, 3, 8, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
    return nn.Sequential(*layers).eval()


@functools.cache
def captured(samples: int | None = None) -> optimize.Program:
    """Return ``net`` captured, for the pass, which changes a copy; with a number of samples its batch is fixed."""
    return optimize.capture(net(), (images(samples or 2),), dynamic_batch=samples is None)


def quantized(program: optimize.Program, data: Any, **options: Any) -> optimize.Program:
    return optimize.QuantizeStatic(calibration=data, **options).apply(program)[0]


def deployed_db(
    folder: Path, module: nn.Module, data: Any, *inputs: Tensor, program: optimize.Program | None = None, **options: Any
) -> list[float]:
    """Return the signal-to-noise ratio of each output of the exported file, dB; 200 for equal ones."""
    program = quantized(program or optimize.capture(module, inputs), data, **options)
    found = optimize.export(program, "onnx", folder / "m.onnx").load(threads=1)(*inputs)
    with torch.no_grad():
        pairs = zip(pytree.tree_leaves(module(*inputs)), pytree.tree_leaves(found), strict=True)
    decibels = []
    for wanted, got in pairs:
        signal = float(wanted.double().square().sum())
        noise = float((wanted.double() - torch.as_tensor(got).double()).square().sum())
        assert math.isfinite(noise)
        decibels.append(200.0 if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise))
    return decibels


def refusal(data: Any, program: optimize.Program | None = None) -> OptimizeError:
    """Return the refusal, which says what to do next."""
    program = program or captured()
    with pytest.raises(OptimizeError) as caught:
        quantized(program, data)
    assert caught.value.hint, "it says what to do next"
    return caught.value


def test_no_data() -> None:
    assert "calibration data is empty" in refusal([]).what


def test_batches_without_samples() -> None:
    assert "calibration data is empty" in refusal([images(0), images(0)]).what


def test_one_sample(tmp_path: Path) -> None:
    assert deployed_db(tmp_path, net(), [images(1)], images(16), program=captured())[0] > 25


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_data_that_is_not_finite(bad: float) -> None:
    spoilt = images(4)
    spoilt[2, 1, 3, 3] = bad
    error = refusal([images(4), spoilt])
    assert "not finite at 'input_1'" in error.what and "calibration data" in error.hint


@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_weights_that_are_not_finite(bad: float) -> None:
    module = net()
    with torch.no_grad():
        module[2].weight[3, 0, 1, 1] = bad
    error = refusal([images(4)], optimize.capture(module, (images(2),)))
    assert "not finite at '2'" in error.what and "weights" in error.hint


@pytest.mark.parametrize("value", [0.0, 0.3, -7.0, 255.0, 1e-20, 1e20])
def test_constant_data(tmp_path: Path, value: float) -> None:
    constant = torch.full((16, 3, 8, 8), value)
    assert deployed_db(tmp_path, net(), [constant], constant, program=captured())[0] > 30


def test_a_small_variation_about_a_large_mean(tmp_path: Path) -> None:
    data = images(64) + 1e4
    assert deployed_db(tmp_path, net(), [data], data[:16])[0] > 30


@pytest.mark.parametrize("factor", [1e-30, 1e25])
def test_data_of_any_size(tmp_path: Path, factor: float) -> None:
    data = images(64) * factor
    assert deployed_db(tmp_path, net(), [data], data[:16])[0] > 30


@pytest.mark.parametrize("calibrator", ["minmax", "average", "percentile", "mse", "entropy"])
def test_data_near_the_end_of_float32(tmp_path: Path, calibrator: str) -> None:
    data = images(64) * 1e38
    assert deployed_db(tmp_path, net(), [data], data[:16], calibrator=calibrator)[0] > 30


def test_data_that_overflows_behind_the_first_layer() -> None:
    error = refusal([images(64) * 3e38])
    assert "not finite at '2'" in error.what and "calibration values reach 3e+38" in error.what


def test_data_whose_differences_overflow() -> None:
    module = net()
    with torch.no_grad():
        module[0].weight.mul_(1e-9)
    error = refusal([(images(64) * 2 - 1) * 3e38], optimize.capture(module, (images(2),)))
    assert "alibration values reach 3e+38" in error.what


def test_constant_activations(tmp_path: Path) -> None:
    """A layer whose answer does not depend on the data: its weights are zero, its bias is not."""
    module = net()
    nn.init.zeros_(module[0].weight)
    nn.init.constant_(module[0].bias, 0.7)
    assert deployed_db(tmp_path, module, [images(16)], images(16))[0] > (35 if HAS_VNNI else 30)  # 8 bits or 7


def test_dead_channels(tmp_path: Path) -> None:
    module = net()
    with torch.no_grad():
        module[0].bias[:5] = -100.0
        module[2].weight[2:4] = 0.0
        module[2].bias[2:4] = 0.0
    assert deployed_db(tmp_path, module, [images(64)], images(16))[0] > 35


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_all_zero_weights(tmp_path: Path, layer: int) -> None:
    module = net()
    nn.init.zeros_(module[layer].weight)
    assert deployed_db(tmp_path, module, [images(64)], images(16))[0] > 35


def test_a_net_of_zeros(tmp_path: Path) -> None:
    module = net()
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    assert deployed_db(tmp_path, module, [images(8)], images(8)) == [200.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.uint8])
def test_another_dtype(dtype: torch.dtype) -> None:
    error = refusal([images(4), images(4).to(dtype)])
    assert "batch 2 does not fit" in error.what and f"must be torch.float32; got {dtype}" in error.what
    assert "whole batches" in error.hint


@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (4, 3, 8), (4, 8, 8, 3), (3, 8, 8)])
def test_another_shape(shape: tuple[int, ...]) -> None:
    assert f"must have shape ['batch', 3, 8, 8]; got {list(shape)}" in refusal([torch.rand(shape)]).what


def test_a_tensor_in_place_of_batches() -> None:
    assert "got [3, 8, 8]" in refusal(images(4)).what


class Two(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x).relu() + self.right(y)


def tokens(samples: int) -> Tensor:
    return torch.randn(samples, 16)


def two() -> optimize.Program:
    """Return ``Two`` captured."""
    return optimize.capture(Two().eval(), (tokens(2), tokens(2)))


@pytest.mark.parametrize("given", [1, 4])
def test_a_wrong_number_of_inputs(given: int) -> None:
    batch = tuple(tokens(4) for _ in range(given))
    assert f"takes 2 input(s) ('x', 'y'); got {given}" in refusal([batch], two()).what


def test_inputs_of_different_batches() -> None:
    error = refusal([(tokens(4), tokens(5))], two())
    assert "different numbers of samples: [4, 5]" in error.what


def test_another_shape_of_the_second_input() -> None:
    assert "'y' must have shape ['batch', 16]; got [4, 6]" in refusal([(tokens(4), torch.rand(4, 6))], two()).what


def test_two_inputs_and_labels(tmp_path: Path) -> None:
    left, right = tokens(64), tokens(64)
    assert deployed_db(tmp_path, Two().eval(), [(left, right, torch.zeros(64))], left, right)[0] > 30


class Several(nn.Module):
    """Outputs in a structure: the value inside a layer, a pair, and a shape-like number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 16, 3), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.stem(x).relu()
        pooled = y.mean((2, 3))
        return {"features": y, "heads": (self.left(pooled), self.right(pooled)), "best": self.right(pooled).argmax(1)}


def test_more_outputs_than_one(tmp_path: Path) -> None:
    module = Several().eval()
    decibels = deployed_db(tmp_path, module, [images(64)], images(16))
    assert len(decibels) == 4 and min(decibels[:3]) > 30
    assert decibels[3] > 10, "most arg max are the same"


class Ids(nn.Module):
    """Integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(ids)).relu().mean(1))


def test_integer_inputs(tmp_path: Path) -> None:
    ids = [torch.randint(0, 20, (32, 6)) for _ in range(2)]
    assert deployed_db(tmp_path, Ids().eval(), ids, ids[0])[0] > 30


def test_a_generator() -> None:
    error = refusal(images(2) for _ in range(3))
    assert isinstance(error, UsageError) and "re-iterable" in error.what


def test_something_that_is_no_data() -> None:
    assert "got int" in refusal(5).what


@pytest.mark.parametrize(
    ("batch", "what"),
    [(None, "'NoneType'"), (3, "'int'"), ("abc", "takes 1 input(s)"), ([None], "must be a tensor")],
)
def test_batches_that_are_no_tensors(batch: Any, what: str) -> None:
    told = refusal([batch]).what
    assert "batch 1 does not fit" in told and what in told


def test_arrays_in_place_of_tensors() -> None:
    assert "must be a tensor" in refusal([(images(4).numpy(),)]).what


@pytest.mark.parametrize("samples", [3, 5])
def test_a_batch_that_is_not_the_fixed_one(samples: int) -> None:
    error = refusal([images(4), images(samples)], captured(4))
    assert f"must have shape [4, 3, 8, 8]; got [{samples}, 3, 8, 8]" in error.what and "whole batches" in error.hint


def test_a_fixed_batch_is_calibrated_as_it_is(tmp_path: Path) -> None:
    data = list(images(40).split(4))
    assert deployed_db(tmp_path, net(), data, images(4), program=captured(4))[0] > 30


class Masked(nn.Module):
    """Minus infinity before a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(1, 2) / 4).masked_fill(later, -INFINITY)
        return self.head(scores.softmax(-1) @ value)


def test_minus_infinity_inside_an_attention(tmp_path: Path) -> None:
    data = torch.randn(64, 6, 16)
    assert deployed_db(tmp_path, Masked().eval(), [data], data)[0] > 30


class Failing:
    """Data whose reading fails on the way."""

    def __iter__(self) -> Iterator[Tensor]:
        yield images(4)
        raise OSError("the disk is gone")


def test_an_error_of_the_data_is_not_hidden() -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        quantized(captured(), Failing())


@pytest.mark.parametrize("calibrator", ["minmax", "average", "percentile", "mse", "entropy"])
@pytest.mark.parametrize("data", [torch.zeros(4, 3, 8, 8), torch.full((1, 3, 8, 8), 3.0), images(2) * 1e-30])
def test_every_calibrator_survives_odd_data(tmp_path: Path, calibrator: str, data: Tensor) -> None:
    assert deployed_db(tmp_path, net(), [data], data, program=captured(), calibrator=calibrator)[0] > 30


MODEL = (f"{__name__}:net", "--int8", "--to", "onnx", "--input-shape", "3,8,8", "--no-layer-timing")


def test_the_command_takes_one_constant_sample(tmp_path: Path, typed: Typed) -> None:
    np.savez(tmp_path / "data.npz", x=np.full((1, 3, 8, 8), 0.3, np.float32))
    done = typed(*MODEL, "--calib", tmp_path / "data.npz", "--out", tmp_path / "optimized")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "optimized" / "report.json").read_text())
    (row,) = (row for row in report["rows"] if row["precision"] == "int8")
    assert row["status"] == "measured" and row["agreement"]["sqnr_db"] > 20


def test_the_command_refuses_fewer_samples_than_a_fixed_batch(tmp_path: Path, typed: Typed) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3, 8, 8), np.float32))
    done = typed(*MODEL, "--calib", tmp_path / "data.npz", "--static-batch", "8", "--out", tmp_path / "optimized")
    assert done.returncode == Refused.exit_code
    assert "fewer samples than the fixed batch" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "optimized").exists()
