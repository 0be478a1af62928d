"""AOTInductor: the program compiled to C++ for this CPU, in one file that torch loads.

Compiled in a child process; coverage is read from the C++ inside the file, because inductor fuses integers only where
both sides of a pool or a zero padding share one scale, and says nothing where they do not. It is told the shape to pack
convolutions for: with a free batch it packs for none, and reorders weights at every run, five sixths of a ResNet-50's
time in INT8 and a quarter in float (one sample gains 1.2 to 1.5 times, larger batches a few percent). Free heights and
widths are packed for the example's. What a packed convolution returns is channels last, which inductor is told too:
behind an input of one channel or one pixel it read it as channels first, and answered wrongly.
"""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimize.errors import Refused, TargetUnavailable
from optimize.registry import register_target
from optimize.regular import open_zip
from optimize.targets import packaging
from optimize.targets.base import Artifact, Availability, Coverage, Probing, Runner, Support, Target

if TYPE_CHECKING:
    from optimize.program import Program
    from optimize.targets.probe import Probe


#: Measured with oneDNN held down to AVX512-VNNI and to AVX2.
_WIDENED = (
    "bfloat16 needs AVX512-BF16 or AMX: with AVX-512 alone a ResNet-18 took 4 times as long as in float32 and a ViT "
    "more than 1000 times; with AVX2 both ended."
)


@register_target
class PT2(Target):
    """Compiles the program with inductor ahead of time; the file holds a native library, the weights in it.

    Float programs, bfloat16 included, run on oneDNN and on loops compiled for this CPU. Static INT8 is written in
    inductor's own words and fused by it: convolutions and linear layers with their activations and sums become integer
    kernels of oneDNN, the rest float loops. The compiler runs in a child process and takes 10 s to a minute.

    Elsewhere the file is loaded with ``torch._inductor.aoti_load_package(path)``; nothing but torch is needed. Where
    there is a C++ compiler, that function makes trial builds once to compare CPUs; ``TORCHINDUCTOR_VEC_ISA_OK=1`` skips
    them.
    """

    name = "pt2"
    suffix = ".pt2"
    summary = "AOTInductor package, compiled for this CPU and this torch; float32, bfloat16 and static INT8."
    support = Support(("float32", "bfloat16"), ("static",), remark="Tied to the CPU and the torch release it is for.")
    profiled = True
    alone = """
import torch

model = torch._inductor.aoti_load_package(path)

def f(*arrays):
    with torch.inference_mode():
        return [output.numpy() for output in model(*map(torch.from_numpy, arrays))]
"""
    noun = "AOTInductor package"
    portable = False
    without_bfloat16 = _WIDENED

    def available(self) -> Availability:
        """Say whether there is a C++ compiler; files run without one."""
        versions = {"torch": importlib.metadata.version("torch")}
        reason, install = packaging.lacking_compiler()
        return Availability(export=not reason, run=True, version=versions, reason=reason, install=install)

    def export(self, program: Program, path: Path) -> Artifact:
        """Compile the program for this CPU.

        Raises:
            TargetUnavailable: There is no C++ compiler.
            Refused: Inductor cannot compile the program, its INT8 is not static, or no layer can run in INT8.
        """
        from optimize.precision.lowering import refuse_mixed

        refuse_mixed(program, "Inductor")
        found = self.available()
        if not found.export:
            raise TargetUnavailable(f"The pt2 target cannot compile: {found.reason}.", hint=found.install)
        cpu = packaging.made_for(self, program)
        coverage = _compile_float(program, path) if program.quantization is None else _compile_int8(program, path, cpu)
        return packaging.describe(self, program, path, coverage=coverage, notes=(_tied(found.version["torch"], cpu),))

    def owns(self, path: Path) -> bool:
        """Say whether a file is a package, by its members: torch.export programs have the same ending."""
        try:
            with open_zip(path) as archive:
                return any("aotinductor/" in name for name in archive.namelist())
        except Exception:  # what is no archive, or a broken one, is told by `load`
            return False

    def open(self, path: Path, *, trust: bool = False) -> Artifact:
        """Describe a package; what it takes is not written in it.

        Raises:
            Refused: It is not trusted: it holds native code.
        """
        if not trust:
            raise Refused(
                f"'{path}' is native code, compiled ahead of time for one machine.",
                hint="Give --trust if you made it yourself.",
            )
        return packaging.open_archive(self, path, trust=trust)

    def label(self, path: Path, said: Mapping[str, str]) -> None:
        """Write what became of a package beside its code, as one of its extra files."""
        packaging.say_in_archive(path, said)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load the file; ``threads`` sets torch's threads, which all its work in this process shares."""
        import torch

        from optimize.targets.torch_runner import TorchRunner

        with _unpacking_folder():
            # What aoti_load_package wraps, without its trial builds with g++ to find out what this CPU can do.
            loader = torch._C._aoti.AOTIModelPackageLoader(str(artifact.path), "model", False, 1, -1)

        def run(*inputs: torch.Tensor) -> Any:
            return loader.run(list(inputs))

        runner = TorchRunner(artifact, run, threads)
        runner.shared = False
        return runner

    def noting_kernels(self) -> AbstractContextManager[None]:
        """Let packages compiled meanwhile tell torch's profiler when each kernel runs."""
        from optimize.targets.pt2.compiler import NOTES_KERNELS

        return packaging.variable(NOTES_KERNELS, "1")

    def probe(self, asked: Probing) -> Probe:
        """Load a package, compiled under ``noting_kernels``, for torch's profiler."""
        from optimize.targets.pt2.coverage import PT2Probe

        return PT2Probe(self.load(asked.artifact, threads=asked.threads), asked)


def _tied(torch_version: str, cpu: str) -> str:
    kind = f"{platform.machine()}, {cpu}; --cpu changes nothing about that" if cpu else platform.machine()
    return (
        f"Compiled for this CPU ({kind}) with torch {torch_version.split('+')[0]}: run it with that "
        "release on the same kind of CPU, and export again elsewhere. The file is native code: load only your own."
    )


def _compile_float(program: Program, path: Path) -> Coverage | None:
    from optimize.targets.pt2.compiler import compile_package

    compile_package(program.export(), path)
    return None


def _compile_int8(program: Program, path: Path, cpu: str) -> Coverage:
    from optimize.targets.pt2.compiler import compile_package
    from optimize.targets.pt2.coverage import coverage
    from optimize.targets.pt2.lowering import lower

    if platform.machine() not in ("x86_64", "AMD64"):
        raise Refused("Inductor fuses integer layers on x86-64 only.", hint="Choose torchscript or onnx.")
    lowered, placement = lower(program)
    compile_package(lowered.export(), path, cpu=cpu)
    return coverage(path, placement)


@contextmanager
def _unpacking_folder() -> Iterator[None]:
    """Let torch unpack a package into a folder that is removed at once: a mapped library needs no name.

    Torch removes its copy when the process ends by itself; a worker that is killed would leave one each time.
    """
    with (
        tempfile.TemporaryDirectory(prefix="optimize-", ignore_cleanup_errors=True) as folder,
        packaging.variable("TMPDIR", folder),
    ):
        yield
