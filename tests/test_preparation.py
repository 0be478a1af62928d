"""Models that are oddly made, or hardly are models: each works, or is refused in a sentence that names the layer."""

import dataclasses
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import optimize
from optimize import graph, registry
from optimize.distances import output_error
from optimize.errors import Refused
from optimize.frontend import capture
from optimize.report import html, operations
from optimize.report.changes import tell_change
from optimize.report.console import show
from optimize.report.drawing import draw
from optimize.targets.arrays import to_array
from tests.nets import Called

Build = Callable[[], nn.Module]


class Constant(nn.Module):
    """Takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return 2 * self.weight


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return y, y


ROWS = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
#: What works, with its inputs.
WORKS: dict[str, tuple[Build, tuple[Tensor, ...]]] = {
    "a sum over everything": (lambda: Called(lambda _, x: x.sum()), (ROWS,)),
    "a mean over everything": (lambda: Called(lambda _, x: x.mean()), (ROWS,)),
    "the identity": (nn.Identity, (ROWS,)),
    "an input that nobody reads": (lambda: Called(lambda _, x, y: x), (ROWS, ROWS)),
    "no parameters": (nn.ReLU, (ROWS,)),
    "an output of no values": (lambda: Called(lambda _, x: x[:, :0]), (ROWS,)),
    "an input of no values": (nn.ReLU, (torch.zeros(2, 0),)),
    "a single number": (lambda: Called(lambda _, x: 2 * x), (torch.tensor(3.0),)),
    "a single number beside samples": (lambda: Called(lambda _, x, y: x * y), (ROWS, torch.tensor(3.0))),
    "no inputs": (Constant, ()),
    "an input among the outputs": (lambda: Called(lambda _, x: (x, x + 1)), (ROWS,)),
    "one output twice": (lambda: Called(lambda _, x: twice(x)), (ROWS,)),
    "integers": (lambda: Called(lambda _, x: x.argmax(1)), (ROWS,)),
    "truth values": (lambda: Called(lambda _, x: x > 0), (ROWS,)),
    "not a number": (lambda: Called(lambda _, x: x / 0 * 0), (ROWS,)),
}


@pytest.mark.parametrize("name", WORKS)
def test_models_that_hardly_are_any_work_all_the_way(name: str, tmp_path: Path) -> None:
    build, inputs = WORKS[name]
    program = capture(build(), inputs)
    program.check()
    shown = operations.compare(program, program)
    show(tell_change(shown, name), console=Console(file=io.StringIO()))
    assert "<svg" in html.render_picture(draw(shown), name)
    expected = program.run(program.inputs)
    for target in ("eager", "torchscript", "onnx"):
        artifact = optimize.export(program, target, tmp_path / f"net.{target}")
        runner = registry.find_target(target).load(artifact, threads=1)
        found = runner.run([to_array(tensor) for tensor in program.inputs])
        for want, got in zip(expected, map(torch.as_tensor, found), strict=True):
            assert output_error(want, got)[0] < 1e-5 and want.dtype == got.dtype


def test_a_run_needs_no_batch(tmp_path: Path) -> None:
    build, inputs = WORKS["a single number"]
    report = optimize.optimize(build(), inputs, targets="torchscript", out=tmp_path / "out")
    assert [row.status for row in report.rows] == ["measured"]


def net(change: Callable[[Any], object]) -> Build:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)).eval()
        change(made)
        return made

    return build


def named(name: str) -> Build:
    """Return a way to make a model with a layer of this name."""

    def build() -> nn.Module:
        made = nn.Sequential()
        made.add_module(name, nn.Linear(4, 2))
        return made.eval()

    return build


def replaced(layer: nn.Module, name: str, value: Any) -> None:
    """Put something under the name of a weight, as a file that was made by hand may."""
    delattr(layer, name)
    setattr(layer, name, value)


IMAGES = torch.zeros(2, 3, 8, 8)
#: What is refused, and the layer or words that the sentence names.
REFUSED: dict[str, tuple[Build, tuple[Any, ...], str]] = {
    "a stride of letters": (net(lambda made: setattr(made[0], "stride", "a")), (IMAGES,), "layer '0' (Conv2d)"),
    "no groups": (net(lambda made: setattr(made[0], "groups", None)), (IMAGES,), "layer '0' (Conv2d)"),
    "no epsilon": (net(lambda made: setattr(made[1], "eps", None)), (IMAGES,), "layer '1' (BatchNorm2d)"),
    "an epsilon of letters": (net(lambda made: setattr(made[1], "eps", "a")), (IMAGES,), "layer '1' (BatchNorm2d)"),
    "a number for a weight": (net(lambda made: replaced(made[3], "weight", 3)), (IMAGES,), "layer '3' (Linear)"),
    "a number for a parameter": (
        net(lambda made: made[3]._parameters.update(weight=3)),
        (IMAGES,),
        "'weight' of the type int; a Parameter belongs there",
    ),
    "a number for a buffer": (
        net(lambda made: made[1]._buffers.update(running_var=3)),
        (IMAGES,),
        "'running_var' of the type int",
    ),
    "a number for a layer": (net(lambda made: made._modules.update({"1": 3})), (IMAGES,), "'1' of the type int"),
    "a layer without parts": (net(lambda made: made[1].__dict__.pop("_buffers")), (IMAGES,), "layer '1'"),
    "a name that is code": (named('x"); print("owned"); ("x'), (ROWS,), "which code cannot name"),
    "a name of two lines": (named("a\n::error::b"), (ROWS,), "which code cannot name"),
    "a name that is no text": (named("a\udcff"), (ROWS,), "which code cannot name"),
    "a word of Python": (named("class"), (ROWS,), "'class', which code cannot name"),
    "a lock": (net(lambda made: setattr(made[2], "lock", threading.Lock())), (IMAGES,), "'lock' of the layer '2'"),
    "a layer without a size": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        (ROWS,),
        "layer '0' (LazyLinear) has no weights",
    ),
    "weights without values": (lambda: nn.Linear(4, 2, device="meta"), (ROWS,), "device 'meta'"),
    "no outputs": (lambda: Called(lambda _, x: ()), (ROWS,), "returns no tensor"),
    "complex outputs": (lambda: Called(lambda _, x: torch.complex(x, x)), (ROWS,), "Output 0 of the model is complex"),
    "complex inputs": (nn.Identity, (torch.complex(ROWS, ROWS),), "input is complex"),
    "no samples": (lambda: nn.Linear(4, 2), (torch.zeros(0, 4),), "no samples"),
    "no tensor": (nn.Identity, ("a",), "found str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_by_name(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    build, inputs, words = REFUSED[name]
    with pytest.raises(Refused) as refusal:
        capture(build(), inputs)
    assert words in refusal.value.what and refusal.value.hint
    assert capsys.readouterr() == ("", "")


def test_what_torch_prints_of_a_graph_stays_inside(capsys: pytest.CaptureFixture[str]) -> None:
    built = net(lambda made: setattr(made[1], "eps", torch.tensor(1e-5)))()
    with pytest.raises(Refused, match="cannot capture"):
        capture(built, (IMAGES,))
    assert capsys.readouterr() == ("", "")


SECRET = b"what lies around a view is the user's own"


def around(view: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a view of a float tensor whose other elements spell the secret."""
    held = torch.zeros(4, 16)
    spelled = torch.frombuffer(bytearray(SECRET.ljust(64)), dtype=torch.float32)
    held[2:] = spelled.repeat(2).reshape(2, 16)
    return view(held)


@pytest.mark.parametrize("target", ["eager", "torchscript", "onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_files_hold_no_more_than_the_views_that_were_given(target: str, tmp_path: Path) -> None:
    view, weight = (around(lambda held: held[0:2]) for _ in range(2))
    layer = nn.Linear(16, 2, bias=False)
    layer.weight = nn.Parameter(weight)
    assert all(SECRET in bytes(given.detach().untyped_storage().tolist()) for given in (view, weight))
    program = capture(layer, (view,))
    optimize.export(program, target, tmp_path / "net.file")
    assert all(SECRET not in path.read_bytes() for path in tmp_path.iterdir())


def test_example_inputs_are_the_programs_own() -> None:
    given = around(lambda held: held[0:2])
    program = capture(nn.Linear(16, 1), (given,))
    assert program.inputs[0].untyped_storage().nbytes() == given.numel() * given.element_size()


class Cache:
    """Keeps values for the next call, as language models' caches do."""

    def __init__(self, *values: Tensor) -> None:
        self.values = values


@dataclasses.dataclass
class Answer:
    """What a model of somebody's returns."""

    logits: Tensor
    loss: Tensor | None = None
    cache: Cache | None = None


class Several(nn.Module):
    """Returns tensors among other things."""

    def __init__(self, arrange: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.head, self.arrange = nn.Linear(4, 2), arrange

    def forward(self, x: Tensor) -> Any:
        return self.arrange(self.head(x), x)


@pytest.mark.parametrize(
    ("arrange", "names", "left"),
    [
        (lambda y, x: (y, None, x), ("output_0", "output_1"), "'1' (None)"),
        (lambda y, x: Answer(y), ("logits",), "'loss' (None), 'cache' (None)"),
        (lambda y, x: {"y": y, "kept": Cache(x)}, ("y",), "'kept' (Cache)"),
        (
            lambda y, x: [y, (None, {"x": x, "cache": [Cache(x)]})],
            ("output_0", "output_1_0_x"),
            "'1.0' (None), '1.1.cache.0'",
        ),
        (lambda y, x: (y, *[None] * 5), ("output_0",), "'3' (None) and 2 more"),
    ],
)  # fmt: skip
def test_tensors_are_kept_and_what_is_none_is_left_out_by_name(
    arrange: Callable[[Tensor, Tensor], Any], names: tuple[str, ...], left: str
) -> None:
    module, x = Several(arrange).eval(), torch.randn(3, 4)
    program = capture(module, (x,))
    assert program.output_names == names and [left in note for note in program.notes] == [True]
    torch.testing.assert_close(program.run((x,))[0], module.head(x))
    assert graph.origin(next(graph.calls(program.graph, graph.aten.linear.default))) == "head"
    assert type(module) is Several


def test_outputs_of_tensors_alone_keep_their_structure_and_nothing_is_said() -> None:
    program = capture(Several(lambda y, x: {"a": [y, x]}).eval(), (torch.randn(3, 4),))
    assert not program.notes and isinstance(program(torch.randn(3, 4))["a"], list)
