"""ExecuTorch: a ``.pte`` program for phones and small CPUs, in float32 on XNNPACK's kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optimize.errors import Refused, first_line
from optimize.files import whole
from optimize.registry import register_target
from optimize.targets import packaging
from optimize.targets.base import Artifact, Availability, Runner, Support, Target

if TYPE_CHECKING:
    import torch

    from optimize.program import Program

INSTALL = "pip install executorch"
_CORES = "The Python runtime of ExecuTorch takes all processors: its threads are set where the file is deployed."


@register_target
class ExecuTorch(Target):
    """Writes an ExecuTorch program in float32: what XNNPACK has kernels for goes there, the rest to portable ones.

    The file runs on Android, iOS and Linux with ExecuTorch's C++ runtime, and here with its Python bindings. INT8 is
    not written: XNNPACK wants quantize and dequantize around every operator, which no placement of this package does.
    """

    name = "executorch"
    suffix = ".pte"
    summary = "ExecuTorch program for phones and small CPUs, run with XNNPACK's kernels"
    support = Support(("float32",), free="batch", remark="INT8 is not written for it.")
    packages = ("executorch",)

    def available(self) -> Availability:
        """Say whether ExecuTorch is installed; it both writes and runs the file."""
        if importlib.util.find_spec("executorch") is None:
            return Availability(export=False, run=False, reason="ExecuTorch is not installed", install=INSTALL)
        versions = {name: importlib.metadata.version(name) for name in ("executorch", "torch")}
        return Availability(export=True, run=True, version=versions)

    def export(self, program: Program, path: Path) -> Artifact:
        """Lower the program to XNNPACK and write it.

        Raises:
            TargetUnavailable: ExecuTorch is not installed.
            Refused: The program is not float32, or ExecuTorch lacks an operator of it.
        """
        self.require()
        self.require_precision(program)
        lowered = _lower(program.export())
        with whole(path) as temporary:
            temporary.write_bytes(lowered.buffer)
        notes = _placed(lowered.exported_program().graph), _CORES
        return packaging.describe(self, program, path, notes=notes)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load the file with ExecuTorch's Python bindings; they have no say in its threads.

        Raises:
            TargetUnavailable: ExecuTorch is not installed.
        """
        self.require()
        return ExecuTorchRunner(artifact)


class ExecuTorchRunner(Runner):
    """A loaded program and its one method."""

    def __init__(self, artifact: Artifact) -> None:
        from executorch.extension.pybindings.portable_lib import _load_for_executorch

        super().__init__(artifact)
        self._program = _load_for_executorch(str(artifact.path))

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays of their own."""
        import torch

        outputs = self._program.forward(tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in inputs))
        return [output.numpy().copy() for output in outputs]


def _lower(exported: torch.export.ExportedProgram) -> Any:
    """Return the ExecuTorch program with its XNNPACK partitions.

    Raises:
        Refused: ExecuTorch cannot lower it.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            return to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    except Exception as error:  # its passes raise what they like
        raise Refused(f"ExecuTorch cannot lower the program: {first_line(error)}", hint="Choose onnx.") from error
    finally:
        logging.disable(before)


def _placed(graph: torch.fx.Graph) -> str:
    """Return what runs on XNNPACK and what does not, read from the lowered graph."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    delegated = sum("delegate" in name for name in called)
    parts = (name.split(".") for name in called if name.startswith("aten."))
    portable = sorted({name for _, name, *_ in parts} - {"sym_size"})
    rest = f"; on portable kernels: {', '.join(portable)}" if portable else ""
    return f"{delegated} part{'s' if delegated != 1 else ''} of the program run on XNNPACK{rest}."
