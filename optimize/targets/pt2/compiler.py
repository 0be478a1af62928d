"""The process that compiles one package: ``python -m optimize.targets.pt2.compiler PROGRAM.pt2 PACKAGE.pt2``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx

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


def pack_for_one_sample() -> None:
    """Let inductor pack the weights of integer convolutions for a batch of 1 where the batch is free.

    It packs them for no shape at all there, and a convolution that wants another order then puts its weights into it at
    every run: five sixths of the time of a ResNet-50.
    """
    freezing = importlib.import_module("torch._inductor.freezing")
    before = freezing.freezing_passes

    def passes(module: fx.GraphModule, inputs: Any) -> None:
        before(module, inputs)
        for packed in module.graph.find_nodes(op="call_function", target=torch.ops.onednn.qconv_prepack):
            source = next((user.args[0] for user in packed.users if user.args and user.args[0] is not packed), None)
            if packed.args[-1] is None and isinstance(source, fx.Node):
                shape = [size if isinstance(size, int) else 1 for size in source.meta["val"].shape]
                packed.args = (*packed.args[:-1], shape)

    freezing.freezing_passes = passes  # type: ignore[attr-defined]


def main(program: Path, package: Path) -> None:
    """Compile an exported program to an AOTInductor package; exit with the first line of the error where it fails."""
    operators()
    pack_for_one_sample()
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
