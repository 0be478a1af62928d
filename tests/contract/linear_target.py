"""A target from outside the package, as small as one can be: one linear layer, kept and run by NumPy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from optimize.errors import Refused
from optimize.files import whole
from optimize.registry import register_target
from optimize.targets.base import Artifact, Availability, Runner, Support, Target, TensorSpec
from optimize.targets.packaging import describe, describe_file


class LinearRunner(Runner):
    """Multiplies and adds."""

    shared = True

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        with np.load(artifact.path) as file:
            self.weight, self.bias = file["weight"], file["bias"]

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [inputs[0] @ self.weight.T + self.bias]


@register_target
class Linear(Target):
    """Writes the weights of a single linear layer."""

    name = "linear"
    suffix = ".linear"
    summary = "One linear layer, in NumPy"
    support = Support(free="batch")
    endings = (".linear",)
    noun = "linear layer"

    def available(self) -> Availability:
        return Availability(export=True, run=True, version={"numpy": np.__version__})

    def export(self, program: object, path: Path) -> Artifact:
        tensors = {name.rpartition(".")[2]: value for name, value in program.graph_module.state_dict().items()}  # type: ignore[attr-defined]
        if set(tensors) != {"weight", "bias"}:
            raise Refused("The program is not one linear layer.")
        with whole(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **{name: value.numpy() for name, value in tensors.items()})
        return describe(self, program, path)  # type: ignore[arg-type]

    def open(self, path: Path, *, trust: bool = False) -> Artifact:
        with np.load(path) as file:
            inputs = (TensorSpec("x", ("N", file["weight"].shape[1]), "float32"),)
        return describe_file(self.name, path, (), inputs, trust=trust)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        return LinearRunner(artifact)
