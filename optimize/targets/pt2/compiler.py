"""The process that compiles one package: ``python -m optimize.targets.pt2.compiler PROGRAM.pt2 PACKAGE.pt2``."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from optimize.errors import Refused, first_line
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
    """Let inductor pack the weights of convolutions for a batch of 1 where the batch is free.

    It packs them for no shape at all there, and a convolution puts its weights into the order it wants at every run: a
    quarter of the time of a ResNet-50 in float, five sixths in integers. A batch that wants another order still does.
    """
    freezing = importlib.import_module("torch._inductor.freezing")
    before = freezing.freezing_passes

    def passes(module: fx.GraphModule, inputs: Any) -> None:
        before(module, inputs)
        for packed in module.graph.find_nodes(op="call_function", target=torch.ops.onednn.qconv_prepack):
            source = next((user.args[0] for user in packed.users if user.args and user.args[0] is not packed), None)
            if packed.args[-1] is None and isinstance(source, fx.Node):
                packed.args = (*packed.args[:-1], _one_sample(source))
        _pack_floats(module.graph)

    freezing.freezing_passes = passes  # type: ignore[attr-defined]


def _pack_floats(made: fx.Graph) -> None:
    """Pack the weights of float convolutions that are still in torch's order, once for all calls that agree."""
    done: dict[str, fx.Node] = {}
    for node in made.find_nodes(op="call_function", target=torch.ops.mkldnn._convolution_pointwise.default):
        source, weight, _, *settings = node.args[:7]
        if weight.op != "get_attr":
            continue
        args = (weight, *settings, _one_sample(source))
        if str(args) not in done:
            with made.inserting_after(weight):
                done[str(args)] = made.call_function(torch.ops.mkldnn._reorder_convolution_weight, args)
        node.replace_input_with(weight, done[str(args)])


def _one_sample(source: fx.Node) -> list[int]:
    """Return the shape of an input: a batch of 1 where that is free, the example's height and width where those are."""
    batch, *sizes = source.meta["val"].shape
    example = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return [batch if isinstance(batch, int) else 1, *example]


def expect_channels_last() -> None:
    """Let inductor take what a convolution with packed weights returns for channels last, as it is.

    Where the batch is free and the input has one channel or one pixel, so that both orders are one, it takes the result
    for channels first, and the loop behind it reads wrong numbers.
    """
    lowering = importlib.import_module("torch._inductor.mkldnn_ir")
    lowering.is_contiguous_storage_and_layout = lambda x: False  # type: ignore[attr-defined]


def add_in_place() -> None:
    """Let integer linear layers add to what other kernels of oneDNN have returned, where it lies.

    Inductor lets them where a loop made the sum, or such a layer. Behind one layer in float every further sum of a
    transformer went to new memory, which took an eighth of a ViT's time to map and clear.
    """
    fusion, ir = (importlib.import_module(f"torch._inductor.{name}") for name in ("fx_passes.mkldnn_fusion", "ir"))
    before = fusion._qlinear_binary_can_be_inplace

    def is_own(total: Any) -> bool:
        made: Any = total.data.unwrap_view() if isinstance(total.data, ir.BaseView) else None
        made = made.data if isinstance(made, ir.StorageBox) else made
        is_fresh = isinstance(made, ir.ExternKernel) and not made.get_inputs_that_alias_output()
        return before(total) or (is_fresh and total.get_numel() == made.get_numel())

    fusion._qlinear_binary_can_be_inplace = is_own  # type: ignore[attr-defined]


def compile_here(folder: Path, tell: Callable[[str, float], None], program: str, package: str) -> None:
    """Compile an exported program to an AOTInductor package, with inductor's cache in ``folder``.

    Raises:
        Refused: Inductor fails; the first line of its error.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    warnings.simplefilter("ignore")
    operators()
    pack_for_one_sample()
    expect_channels_last()
    add_in_place()
    try:
        exported = torch.export.load(program)
        with torch.no_grad():  # with gradients inductor does not freeze
            torch._inductor.aoti_compile_and_package(
                exported, package_path=package, inductor_configs=dict(CONFIGURATION)
            )
    except Exception as error:
        raise Refused(first_line(error)) from error
