"""Height and width left free: captured, transformed, exported, and refused where a size is baked in."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize import registry
from optimize.errors import Refused, UsageError, VerificationFailed
from optimize.job import open_program
from optimize.recipe import parse
from optimize.workflow import Job
from tests import fresh, references
from tests.slow import but_slowly


def program(name: str) -> tuple[nn.Module, optimize.Program]:
    net = REFERENCES[name].build()
    randomize_batch_norm(net, 0)
    return net.eval(), optimize.capture(net.eval(), (REFERENCES[name].inputs(2),), dynamic_size=True)


@pytest.mark.parametrize("name", but_slowly(["repvgg", "mobilenetv3", "unet"], {"mobilenetv3"}))
def test_a_file_answers_at_another_size_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    net, captured = program(name)
    passes = [optimize.FuseConvBN(), optimize.Reparameterize()]
    artifact = optimize.export(optimize.Pipeline(passes).run(captured).program, "onnx", tmp_path / "net.onnx")
    assert artifact.inputs[0].shape == ("batch", 3, "height", "width")
    x = torch.randn(3, 3, 48, 80, generator=torch.Generator().manual_seed(1))
    (found,) = fresh.answers(tmp_path, [(artifact.path, x)])
    with torch.inference_mode():
        want = net(x)
    assert float((found - want).abs().max() / want.abs().max()) < 1e-5


def test_only_the_batch_is_free_unless_asked() -> None:
    plain = references.captured("resnet", None)
    assert plain.other_sizes() == [] and plain.dynamic == ({0: "batch"},)
    assert [tuple(tensor.shape) for tensor in plain.resized({"batch": 3, "height": 9})] == [(3, 3, 32, 32)]


def test_examples_of_other_sizes_cycle_through_the_pixels() -> None:
    _, captured = program("unet")
    assert captured.other_sizes() == [{"height": 64, "width": 96}, {"height": 16, "width": 16}]
    (larger,) = captured.resized({"batch": 3, **captured.other_sizes()[0]})
    assert captured.batch == 2 and captured.dynamic == ({0: "batch", 2: "height", 3: "width"},)
    assert larger.shape == (3, 3, 64, 96)
    assert torch.equal(larger[2, :, 32:, 64:], captured.inputs[0][0])
    assert captured.sample(5)[0].shape == (5, 3, 32, 32)


def test_the_batch_may_be_fixed_while_the_size_is_free() -> None:
    x = REFERENCES["resnet"].inputs(1)
    captured = optimize.capture(REFERENCES["resnet"].build(), (x,), dynamic_batch=False, dynamic_size=True)
    assert captured.batch is None and captured.dynamic == ({2: "height", 3: "width"},)
    assert captured.resized(captured.other_sizes()[0])[0].shape == (1, 3, 64, 96)


def test_a_position_embedding_of_one_size_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"fixes its height or width: 'add_\d+' fails on \[2, 3, 64, 96\]") as caught:
        program("vit")
    assert "Resample an embedding" in str(caught.value)


def test_a_linear_behind_flatten_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 2)).eval()
    with pytest.raises(Refused, match="fixes its height or width"):
        optimize.capture(net, (torch.rand(2, 3, 8, 8),), dynamic_size=True)


class Remembering(nn.Module):
    """Divides by the number of pixels of the images it was made for: right at one size only, and never fails."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).sum((2, 3)) / float(torch.tensor(x.shape[2:]).prod())


def test_a_size_that_became_a_constant_is_found() -> None:
    with pytest.raises(Refused):
        optimize.capture(Remembering().eval(), (torch.rand(2, 3, 8, 8),), dynamic_size=True)


class Excepting(nn.Module):
    """Computes otherwise at one height; its learned places need no resizing at another, which is the same to it."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.odd, self.places = odd, nn.Parameter(torch.rand(1, 3, 20, 20))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        places = self.places if size[0] == 20 else nn.functional.interpolate(self.places, size=size, mode="bilinear")
        return x + places if size[0] == self.odd else x - places


def test_a_size_that_the_model_excepts_is_tried() -> None:
    optimize.capture(Excepting(3).eval(), (torch.rand(2, 3, 16, 20),), dynamic={"x": {2: "height:4..64"}})
    with pytest.raises(Refused, match="computes otherwise where 'height' is 7"):
        optimize.capture(Excepting(7).eval(), (torch.rand(2, 3, 16, 20),), dynamic={"x": {2: "height:4..64"}})


class SamePadded(nn.Module):
    """A convolution padded as TensorFlow pads, scaled by sizes that are rounded and lose their signs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        pads = [max((math.ceil(size / 2) - 1) * 2 + 3 - size, 0) for size in x.shape[2:]]
        sides = [side for pad in reversed(pads) for side in (pad // 2, pad - pad // 2)]
        return self.norm(self.conv(nn.functional.pad(x, sides))) * abs(x.shape[2] - 50) * math.floor(x.shape[3] / 3)


@pytest.mark.parametrize("target", ["torchscript", "onnx", "openvino"])
def test_sizes_are_rounded_and_lose_their_signs(target: str, tmp_path: Path) -> None:
    net = SamePadded().eval()
    captured = optimize.capture(net, (torch.rand(2, 3, 16, 16),), dynamic_size=True)
    fused = optimize.Pipeline([optimize.FuseConvBN()]).run(captured).program
    torch.export.save(fused.export(), io.BytesIO())  # as baselines are
    runner = optimize.export(fused, target, tmp_path / f"net{registry.find_target(target).suffix}").load(threads=1)
    for size in ((2, 3, 16, 16), (1, 3, 13, 64), (3, 3, 60, 9)):
        x = torch.rand(size)
        with torch.no_grad():
            want = net(x)
        (found,) = runner.run([x.numpy()])
        assert found.shape == tuple(want.shape) and np.abs(found - want.numpy()).max() < 1e-4 * want.abs().max()


def test_the_whole_line_judges_another_size_too(tmp_path: Path) -> None:
    net = REFERENCES["resnet"].build()
    randomize_batch_norm(net, 0)
    x = REFERENCES["resnet"].inputs(2)
    report = optimize.optimize(
        net, (x,), passes=[optimize.FuseConvBN()], dynamic_size=True, out=tmp_path / "out", layer_timing=False
    )
    assert report.rows[0].status == "measured" and report.model.inputs == ("x float32[batch, 3, height, width]",)
    assert report.trace[0].relative_error is not None


def test_a_file_that_holds_a_graph_is_refused(tmp_path: Path) -> None:
    net = nn.Conv2d(3, 4, 3).eval()
    torch.export.save(torch.export.export(net, (torch.rand(2, 3, 8, 8),)), tmp_path / "net.pt2")
    recipe = parse({"targets": ["onnx"]})
    with pytest.raises(UsageError, match="left free in eager modules only"):
        open_program(Job(tmp_path / "net.pt2", recipe.model_copy(update={"dynamic_size": True})))


class ByBatch(nn.Module):
    """Computes with the number of samples, of its calls, or with the spread of a batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.BatchNorm1d(3).train()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "batch":
            return x * 2 if x.shape[0] == 1 else x * 3
        if self.kind == "shape":
            return x.sum(1) if x.shape[0] == 1 else x.sum(1, keepdim=True)
        if self.kind == "calls":
            self.calls += 1
            return x * self.calls
        return self.norm(x)


@pytest.mark.parametrize("kind", ["batch", "shape"])
def test_a_model_that_computes_otherwise_with_one_sample_is_refused(kind: str) -> None:
    with pytest.raises(Refused, match="otherwise with a batch of 1"):
        optimize.capture(ByBatch(kind).eval(), torch.rand(2, 3))
    optimize.capture(ByBatch(kind).eval(), torch.rand(1, 3), dynamic_batch=False)


@pytest.mark.parametrize("kind", ["calls", "spread"])
def test_one_sample_is_no_reason_to_refuse_what_it_says_nothing_of(kind: str) -> None:
    net = ByBatch(kind).eval()
    net.norm.train()
    assert optimize.capture(net, torch.rand(2, 3)).batch == 2


def test_what_torch_captures_otherwise_is_refused_in_python_too() -> None:
    class Aliased(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled = x * 2
            torch.einsum("ab->ab", doubled).add_(1)  # one tensor in eager mode, two in the graph
            return doubled * 2

    with pytest.raises(VerificationFailed, match="differs from the module"):
        optimize.capture(Aliased().eval(), torch.rand(2, 3))


def test_a_module_is_asked_once_at_each_size() -> None:
    shapes = []

    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor:  # no tensor of an export
                shapes.append(tuple(x.shape))
            return x.mean(1)

    optimize.capture(Counting().eval(), (torch.rand(2, 8, 4),), dynamic="length")
    others = [shape for shape in shapes if shape[1] != 8]
    assert len(others) == len(set(others)) == 2


@pytest.mark.parametrize(
    ("first", "step", "told"),
    [
        (None, lambda self, y: y.mean(0) if self.kept is None else self.kept, True),  # a cache of the first call
        (0.0, lambda self, y: self.kept + 1.0, True),
        (None, lambda self, y: y.detach(), False),  # what nobody reads
    ],
)
def test_what_a_model_keeps_between_calls_is_told_where_it_answers_by_it(first: Any, step: Any, told: bool) -> None:
    """A buffer that is written to was told; an attribute of Python was not, and files called once more differ."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(4, 4), first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            self.kept = step(self, y)
            return y + self.kept if told else y

    torch.manual_seed(0)
    notes = optimize.capture(Keeping().eval(), (torch.randn(2, 4),)).notes
    assert ("The model keeps kept between calls and answers by it" in "".join(notes)) is told
