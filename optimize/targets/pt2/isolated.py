"""Compile in a child process: inductor starts compilers and worker processes, keeps caches, and can run for long."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from optimize import sandbox
from optimize.errors import Refused
from optimize.files import whole
from optimize.sandbox import ChildLimits, Died, OutOfTime, Unforeseen
from optimize.targets.packaging import say_in_archive

if TYPE_CHECKING:
    import torch

_COMPILE = "optimize.targets.pt2.compiler:compile_here"
#: The largest networks take a minute; what is not done by then hangs.
LIMIT_S = 1800.0


def compile_package(
    exported: torch.export.ExportedProgram, path: Path, *, limit_s: float = LIMIT_S, cpu: str = ""
) -> None:
    """Compile an exported program to the package ``path``, whole or not at all.

    Inductor's cache lives in a temporary folder that is removed; precompiled headers of torch stay in the system's
    temporary folder, where torch keeps them for all processes of a user. The package says which processor its integers
    were made for, where it has integers.

    Raises:
        Refused: Inductor or the C++ compiler refuses the program, crashes or takes too long.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        folder = Path(name)
        program, package = folder / "program.pt2", folder / "model.pt2"
        with warnings.catch_warnings(action="ignore"):
            torch.export.save(exported, program)
        _compile(folder, {"program": str(program), "package": str(package)}, limit_s)
        with whole(path) as temporary:
            shutil.copyfile(package, temporary)
            if cpu:
                say_in_archive(temporary, {"cpu": cpu})


def _compile(folder: Path, arguments: dict[str, str], limit_s: float) -> None:
    try:
        sandbox.call(
            _COMPILE, arguments, folder, about="The program", limits=ChildLimits.until(limit_s), confined=False
        )
    except OutOfTime as error:
        raise Refused(f"Inductor was still compiling after {limit_s:.0f} s.", hint="Choose onnx.") from error
    except Refused as error:
        ends = {Died: "end", Unforeseen: "reason"}
        reason = getattr(error, ends.get(type(error), "what"))
        raise Refused(f"Inductor cannot compile the program ({reason}).", hint="Choose onnx or torchscript.") from error
