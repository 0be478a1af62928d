"""Arrays of every element type: bfloat16, and tensors without dimensions, both ways and through files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize.errors import Refused
from optimize.measure.worker import read_arrays, write_arrays
from optimize.registry import find_target
from optimize.targets.arrays import element_type, fitted, storable, to_array, to_tensor

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_a_tensor_survives_the_way_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    array = to_array(tensor)
    assert array.shape == shape and array.dtype == element_type(str(dtype).removeprefix("torch."))
    back = to_tensor(array)
    assert back.shape == tensor.shape and back.dtype is dtype and torch.equal(back, tensor)


def test_what_is_no_tensor_is_refused_by_its_type() -> None:
    with pytest.raises(Refused, match="A model returns str, no tensor"):
        to_array("text")  # type: ignore[arg-type]


def test_a_file_takes_a_dictionary_in_any_order_of_its_keys(tmp_path: Path) -> None:
    class Named(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["x"] - batch["y"]

    x, y = torch.rand(2, 3), torch.rand(2, 3)
    run = optimize.export(optimize.capture(Named(), ({"x": x, "y": y},)), "onnx", tmp_path / "net.onnx").load()
    assert torch.equal(run({"y": y, "x": x}), x - y)
    for other in ({"x": x}, {"x": x, "z": y}):
        with pytest.raises(Refused, match=r"The artifact takes 2 input\(s\)"):
            run(other)


def test_a_bfloat16_array_holds_the_same_numbers() -> None:
    tensor = torch.tensor([[1.0, -2.5], [3e38, float("inf")]]).bfloat16().t()
    np.testing.assert_array_equal(to_array(tensor).astype(np.float32), tensor.float().numpy())


def test_bfloat16_goes_through_a_file_as_float32_and_fits_again(tmp_path: Path) -> None:
    array = to_array(torch.randn(5).bfloat16())
    write_arrays(tmp_path / "arrays.npz", [array, np.arange(3)])
    wide, integers = read_arrays(tmp_path / "arrays.npz")
    assert wide.dtype == np.float32 and storable(integers) is integers
    assert fitted(wide, "bfloat16").dtype == array.dtype
    np.testing.assert_array_equal(fitted(wide, "bfloat16").view(np.uint16), array.view(np.uint16))


@pytest.mark.parametrize(
    "given, wanted", [(np.float32, "float32"), (np.float64, "float16"), (np.int64, "bfloat16"), (np.float16, "float16")]
)
def test_only_float32_is_fitted_and_only_to_half(given: type, wanted: str) -> None:
    array = np.ones(2, given)
    assert fitted(array, wanted) is array


class Mean(nn.Module):
    """Answers with one number, without dimensions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).mean()


@pytest.mark.parametrize("target", ["onnx", "torchscript", "eager"])
def test_an_output_without_dimensions_keeps_none(target: str, tmp_path: Path) -> None:
    program = optimize.capture(Mean(torch.float32), (torch.rand(2, 4),))
    runner = optimize.export(program, target, tmp_path / "mean.file").load(threads=1)
    x = torch.rand(3, 4)
    assert runner(x).shape == () and torch.isclose(runner(x), x.mean())
    assert runner(x.numpy()).shape == ()


@pytest.mark.parametrize("target", ["torchscript", "eager", "openvino"])
def test_a_bfloat16_file_is_called_on_tensors_and_arrays(target: str, tmp_path: Path) -> None:
    net = nn.Linear(4, 3).bfloat16().eval()
    program = optimize.capture(net, (torch.rand(2, 4).bfloat16(),))
    runner = optimize.export(program, target, tmp_path / f"net{find_target(target).suffix}").load(threads=1)
    x = torch.rand(5, 4).bfloat16()
    found = runner(x)
    assert found.dtype is torch.bfloat16 and torch.allclose(found, net(x), atol=2e-2)
    assert runner(to_array(x)).dtype == element_type("bfloat16")
    with pytest.raises(Refused, match="must be bfloat16; got float32"):
        runner(x.float())
