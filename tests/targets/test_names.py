"""Files and runners know a model's inputs and outputs by the names it had."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import optimize
from optimize.errors import Refused
from optimize.targets.base import Artifact

Found = namedtuple("Found", "logits hidden")


class Heads(nn.Module):
    """Several outputs; one layer and one buffer have the name of an output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scores, self.other = kind, nn.Linear(4, 3), nn.Linear(3, 2)
        self.register_buffer("boxes", torch.ones(2))

    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> Any:
        y = self.scores(image * scale)
        z = self.other(y) * self.boxes
        return {
            "dict": {"scores": y.relu(), "boxes": z},
            "list in dict": {"scores": y, "boxes": [z, z + 1]},
            "named tuple": Found(y, z),
            "tuple": (y, z),
            "one": z,
            "no word": {"a b": y, "a.b": z},
            "an input's": {"image": y},
            "other keys": {1: y, "é": z},
        }[self.kind]


NAMES = {
    "dict": ("scores", "boxes"),
    "list in dict": ("scores", "boxes_0", "boxes_1"),
    "named tuple": ("logits", "hidden"),
    "tuple": ("output_0", "output_1"),
    "one": ("output_0",),
    "no word": ("output_0", "output_1"),
    "an input's": ("output_0",),
}
X = torch.arange(8.0).reshape(2, 4), torch.full((2, 1), 0.5)


@pytest.mark.parametrize("kind", NAMES)
def test_outputs_have_the_names_that_the_module_gives_them(kind: str, tmp_path: Path) -> None:
    module = Heads(kind).eval()
    program = optimize.capture(module, X)
    artifact = optimize.export(program, "onnx", tmp_path / "net.onnx")
    model = onnx.load(tmp_path / "net.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["image", "scale"]
    assert tuple(value.name for value in model.graph.output) == program.output_names == NAMES[kind]
    assert tuple(spec.name for spec in artifact.outputs) == NAMES[kind]
    expected, found = (torch.utils._pytree.tree_flatten(call(*X)) for call in (module, artifact.load()))
    assert all(map(lambda one, other: torch.allclose(one, other, atol=1e-5), expected[0], found[0]))


def test_keys_that_are_no_words_still_make_names() -> None:
    names = optimize.capture(Heads("other keys").eval(), X).output_names
    assert len(set(names)) == 2 and all(name.isascii() and name.isidentifier() for name in names)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("names") / "net.onnx"
    return optimize.export(optimize.capture(Heads("one").eval(), X), "onnx", path)


def test_a_runner_takes_inputs_by_their_names(artifact: Artifact) -> None:
    runner = artifact.load()
    expected, (image, scale) = runner(*X), X
    assert torch.equal(runner(image=image, scale=scale), expected)
    assert torch.equal(runner(scale=scale, image=image), expected)
    assert torch.equal(runner(image, scale=scale), expected)
    assert np.array_equal(runner(image=image.numpy(), scale=scale.numpy()), expected.numpy())


@pytest.mark.parametrize("given", [{"image": X[0]}, {"imag": X[0], "scale": X[1]}, {"image": X[0], "scale": [X[1]]}])
def test_other_names_are_refused(artifact: Artifact, given: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=r"\['image', 'scale'\]|must have shape"):
        artifact.load()(**given)
