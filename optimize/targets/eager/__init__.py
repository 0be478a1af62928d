"""Eager PyTorch: the captured graph run operator by operator, the baseline of every speed-up."""

from __future__ import annotations

import importlib.metadata
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from optimize import files
from optimize.errors import Refused
from optimize.registry import register_target
from optimize.targets import packaging
from optimize.targets.base import FLOATS, Artifact, Availability, Probing, Runner, Support, Target

if TYPE_CHECKING:
    from optimize.program import Program
    from optimize.targets.probe import Probe


@register_target
class Eager(Target):
    """Saves the program with ``torch.export`` and runs its operators one by one, without guards and without compiling.

    The file is read back with ``torch.export.load``, which may run code that was planted in a file: load only what
    this package wrote.
    """

    name = "eager"
    suffix = ".eager.pt2"
    summary = "Eager PyTorch: the baseline that speed-ups are quoted against; for measuring, not for deploying."
    support = Support(FLOATS)
    profiled = True
    alone = (
        "import torch; m = torch.export.load(path).module(); f = lambda x: m(torch.from_numpy(x))[0].detach().numpy()"
    )

    def available(self) -> Availability:
        """Say that torch, which this package needs anyway, is all it takes."""
        return Availability(export=True, run=True, version={"torch": importlib.metadata.version("torch")})

    def export(self, program: Program, path: Path) -> Artifact:
        """Write the program as a ``.pt2`` file.

        Raises:
            Refused: The program is quantized, or torch.export does not accept it.
        """
        import torch

        if program.quantization is not None:
            raise Refused(
                "Eager PyTorch runs the float program; this one has a quantization plan.",
                hint="Choose a target with INT8 kernels, such as torchscript or onnx.",
            )
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(program.export(), buffer)
        with files.whole(path) as temporary:
            temporary.write_bytes(buffer.getvalue())
        return packaging.describe(self, program, path)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load the file; ``threads`` sets torch's threads, which all its work in this process shares."""
        import torch
        from torch import fx

        from optimize.targets.torch_runner import TorchRunner

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.load(io.BytesIO(artifact.path.read_bytes()))
            unlifted = exported.module(check_guards=False)
        unlifted.graph.set_codegen(fx.graph.CodeGen())
        return TorchRunner(artifact, fx.GraphModule(unlifted, unlifted.graph), threads)

    def probe(self, asked: Probing) -> Probe:
        """Load the file for torch's profiler."""
        from optimize.targets.torch_probe import TorchProbe

        return TorchProbe(self.load(asked.artifact, threads=asked.threads), asked)
