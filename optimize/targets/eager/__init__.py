"""Eager PyTorch: the captured graph run operator by operator, the baseline of every speed-up; and other ways to run it.

The other ways (compiled, channels last, on a GPU with autocast and CUDA graphs) are rows of the report to set files
beside: what PyTorch itself reaches on this machine without exporting to a runtime. Each is a target; those on a GPU are
absent, with the reason, where there is none.
"""

from __future__ import annotations

import importlib.metadata
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from optimize import files
from optimize.errors import Refused
from optimize.registry import register_target
from optimize.targets import packaging
from optimize.targets.base import FLOATS, Artifact, Availability, Probing, Runner, Support, Target

if TYPE_CHECKING:
    import torch

    from optimize.program import Program
    from optimize.targets.probe import Probe


@register_target
class Eager(Target):
    """Saves the program with ``torch.export`` and runs its operators one by one, without guards and without compiling.

    A file that calls operators of others, or holds control flow, is read back with ``torch.export.load``, which may run
    code that was planted in it: load only what this package wrote.
    """

    name = "eager"
    suffix = ".eager.pt2"
    summary = "Eager PyTorch: the baseline that speed-ups are quoted against; for measuring, not for deploying."
    support = Support(FLOATS)
    profiled = True
    alone = """
import torch

model = torch.export.load(path).module()

def f(*arrays):
    with torch.inference_mode():
        return [output.numpy() for output in model(*map(torch.from_numpy, arrays))]
"""

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
        with warnings.catch_warnings(action="ignore"):
            torch.export.save(program.export(), buffer)
        with files.whole(path) as temporary:
            temporary.write_bytes(buffer.getvalue())
        return packaging.describe(self, program, path)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load the file; ``threads`` sets torch's threads, which all its work in this process shares."""
        from optimize.targets.torch_runner import TorchRunner

        return TorchRunner(artifact, _read(artifact.path), threads)

    def probe(self, asked: Probing) -> Probe:
        """Load the file for torch's profiler."""
        from optimize.targets.torch_probe import TorchProbe

        return TorchProbe(self.load(asked.artifact, threads=asked.threads), asked)


def _read(path: Path) -> torch.nn.Module:
    """Return the graph of a file: by this package's reader, for torch's imports its compiler, a worker's second."""
    from torch import fx

    from optimize.load import archive, exported

    try:
        with archive.Archive(path, path.name) as members:
            return exported.read(members, path.name).module
    except Refused:
        with path.open("rb") as file, warnings.catch_warnings(action="ignore"):
            unlifted = exported.read_trusted(file).module(check_guards=False)
        unlifted.graph.set_codegen(fx.graph.CodeGen())
        return fx.GraphModule(unlifted, unlifted.graph)


@dataclass(frozen=True)
class Way:
    """How a module is run.

    Attributes:
        device: ``cpu`` or ``cuda``.
        channels_last: Weights of convolutions and images lie in memory pixel by pixel.
        autocast: Type that torch's autocast computes products in; empty for the module's own.
        compiled: By ``torch.compile`` with inductor, at the first run of a shape.
        graphs: Record the kernels of a shape as a CUDA graph and replay it; implies ``compiled``.
    """

    device: str = "cpu"
    channels_last: bool = False
    autocast: str = ""
    compiled: bool = False
    graphs: bool = False

    def prepare(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return what runs a module this way, on tensors that lie anywhere."""
        import torch

        module = module.to(self.device)
        for weight in module.parameters():
            weight.data = self._laid_out(weight.data)
        run: Callable[..., Any] = module
        if self.compiled or self.graphs:
            run = torch.compile(module, mode="reduce-overhead" if self.graphs else "default")

        def prepared(*inputs: torch.Tensor) -> Any:
            cast = torch.autocast(self.device, getattr(torch, self.autocast)) if self.autocast else nullcontext()
            with cast:
                return run(*(self._laid_out(x.to(self.device)) for x in inputs))

        return prepared

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an image or a kernel in the way's order, anything else as it is."""
        import torch

        if not self.channels_last or tensor.dim() != 4:
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last)


class _OtherWay(Eager):
    """The eager file, run in another way; a subclass says which."""

    way: ClassVar[Way]
    profiled = False
    alone = ""

    @property
    def device(self) -> str:
        """Where the way runs."""
        return self.way.device

    def available(self) -> Availability:
        """Say whether this machine has what the way needs: a C++ compiler, or a GPU."""
        versions = {"torch": importlib.metadata.version("torch")}
        if self.way.device == "cuda":
            reason, install = _no_gpu()
        else:
            reason, install = packaging.lacking_compiler() if self.way.compiled else ("", "")
        return Availability(export=not reason, run=not reason, version=versions, reason=reason, install=install)

    def export(self, program: Program, path: Path) -> Artifact:
        """Write the eager file.

        Raises:
            TargetUnavailable: This machine cannot run it this way.
            Refused: The program is quantized, or torch.export does not accept it.
        """
        self.require()
        return super().export(program, path)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load the file and prepare it; what is compiled is compiled at the first run of a shape."""
        from optimize.targets.torch_runner import TorchRunner

        self.require()
        eager = super().load(artifact, threads=threads)
        assert isinstance(eager, TorchRunner)
        runner = TorchRunner(artifact, self.way.prepare(eager.module), device=self.device)  # type: ignore[arg-type]
        runner.shared = False
        return runner


def _no_gpu() -> tuple[str, str]:
    """Return why there is no CUDA device and what would help; empty where there is one."""
    import torch

    if torch.cuda.is_available():
        return "", ""
    if torch.version.cuda is None:
        return "this torch is built for CPUs alone", "pip install torch, from the CUDA index of pytorch.org"
    return "no CUDA device was found", ""


def _register(name: str, summary: str, way: Way, remark: str = "") -> None:
    """Register the eager file, run in a way, as a target."""

    class Other(_OtherWay):
        __doc__ = f"{summary}."

    if way.device == "cuda":
        remark = "For measuring beside runtimes; absent without a GPU."
    Other.name, Other.suffix, Other.summary, Other.way = name, f".{name}.pt2", summary, way
    Other.support = Support(FLOATS, remark=remark)
    register_target(Other)


_register(
    "compile",
    "torch.compile on CPU: the eager file, compiled by inductor where it is loaded",
    Way(compiled=True),
    "Compiled where it is loaded, at the first run of a shape.",
)
_register("channels-last", "Eager PyTorch on CPU with images and kernels channels last", Way(channels_last=True))
_register("cuda", "Eager PyTorch on the GPU", Way("cuda"))
_register(
    "cuda-channels-last",
    "Eager PyTorch on the GPU with images and kernels channels last",
    Way("cuda", channels_last=True),
)
_register(
    "cuda-autocast",
    "Eager PyTorch on the GPU, channels last, under autocast to float16",
    Way("cuda", channels_last=True, autocast="float16"),
)
_register("cuda-compile", "torch.compile on the GPU", Way("cuda", compiled=True))
_register("cuda-graphs", "torch.compile on the GPU with CUDA graphs", Way("cuda", graphs=True))
