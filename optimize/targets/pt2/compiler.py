"""The process that compiles one package: ``python -m optimize.targets.pt2.compiler PROGRAM.pt2 PACKAGE.pt2``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from optimize.targets.pt2.lowering import operators

CONFIGURATION = {
    # Weights become constants: packed for oneDNN, and integer layers fused with what surrounds them.
    "freezing": True,
    # Loops take the threads of the process that runs them, not of this one.
    "cpp.dynamic_threads": True,
    # Short ones too, which inductor would write into the code: what runs on integers is read from their names.
    "always_keep_tensor_constants": True,
    # What /proc/cpuinfo says is enough; a trial build for every instruction set would take 8 s.
    "cpp.vec_isa_ok": True,
}


def main(program: Path, package: Path) -> None:
    """Compile an exported program to an AOTInductor package; exit with the first line of the error where it fails."""
    operators()
    exported = torch.export.load(program)
    try:
        with torch.no_grad():  # with gradients inductor does not freeze
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(package), inductor_configs=dict(CONFIGURATION)
            )
    except Exception as error:
        raise SystemExit((str(error).strip() or type(error).__name__).splitlines()[0]) from error


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
