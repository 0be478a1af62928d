"""Compile in a child process: inductor starts compilers and worker processes, keeps caches, and can run for long."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from optimize import sandbox
from optimize.errors import Refused, first_line
from optimize.files import whole
from optimize.sandbox import ChildLimits, Died, OutOfTime, Unforeseen
from optimize.sealing import is_own
from optimize.targets.packaging import say_in_archive
from optimize.targets.pt2.lowering import operators

_COMPILE = "optimize.targets.pt2.compiler:compile_here"
#: The variable that lets a package tell torch's profiler when each kernel runs.
NOTES_KERNELS = "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"
#: The largest networks take a minute; what is not done by then hangs.
LIMIT_S = 1800.0
#: Of a precompiled header, at least.
_HEADER_BYTES = 1.5e8
#: How long precompiled headers are kept.
_KEPT_S = 30 * 86400.0
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


def fuse_once() -> None:
    """Let inductor put no second activation or sum into a convolution that has one: it meant to, and asserts that.

    A convolution whose activation several read has it, and is looked at again where one of them adds it to another.
    """
    fusion = importlib.import_module("torch._inductor.fx_passes.quantization")
    before = fusion._is_valid_qconv_post_op_fusion_pattern

    def valid(has_binary_post_op: bool = False) -> Callable[[Any], bool]:
        check = before(has_binary_post_op)
        return lambda match: match.kwargs["postop_name"] == "none" and check(match)

    fusion._is_valid_qconv_post_op_fusion_pattern = valid  # type: ignore[attr-defined]


def shape_lines() -> None:
    """Let torch know the length that an integer convolution of one dimension returns.

    Its packed weights have two, the first of which is 1, and torch takes that for the kernel's size.
    """
    meta = importlib.import_module("torch._meta_registrations")
    before = meta.calc_conv_nd_return_shape

    def shape(x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> list[Any]:
        return before(x, weight.select(2, 0) if weight.dim() > x.dim() else weight, *settings)

    meta.calc_conv_nd_return_shape = shape  # type: ignore[attr-defined]


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


@contextlib.contextmanager
def kept_headers(folder: Path) -> Iterator[None]:
    """Let torch find the headers precompiled before, 150 MB and ten seconds each, and keep those that it makes.

    Torch takes a name in the system's temporary folder that everybody knows, compiles what lies there into the
    package, and takes what a compiler that was killed has left for whole. Here they are made in ``folder``, and kept
    for a month where nobody else can have put some, once all are whole.
    """
    place = Path(tempfile.gettempdir(), f"optimize-headers-{getattr(os, 'geteuid', int)()}")
    with contextlib.suppress(OSError):
        place.mkdir(stat.S_IRWXU)
    try:
        found = place.lstat()
        is_kept = stat.S_ISDIR(found.st_mode) and is_own(found, 0o077)
    except OSError:
        is_kept = False
    own = folder / "headers"
    own.mkdir(parents=True)
    codecache = importlib.import_module("torch._inductor.codecache")
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(own), str(own / "locks")  # type: ignore[attr-defined]
    for file in place.glob("*.gch") if is_kept else ():
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - file.stat().st_mtime > _KEPT_S:
                file.unlink()
            else:
                os.link(file, own / file.name)
    yield
    for file in own.glob("*.gch") if is_kept else ():
        with contextlib.suppress(OSError):  # it is there
            os.link(file, place / file.name)


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
    fuse_once()
    shape_lines()
    add_in_place()
    try:
        exported = torch.export.load(program)
        with kept_headers(folder), torch.no_grad():  # with gradients inductor does not freeze
            # What torch saw of the environment when it was imported may be older.
            notes = {"cpp.enable_kernel_profile": os.environ.get(NOTES_KERNELS) == "1"}
            calls = {node.target for node in exported.graph.nodes}
            if (
                torch.ops.aten.conv_transpose3d.input in calls
                and operators().dequantize_per_channel.default not in calls
            ):
                notes["freezing"] = False  # frozen behind a convolution, it answers one sample wrongly (torch 2.13)
            torch._inductor.aoti_compile_and_package(
                exported, package_path=package, inductor_configs={**CONFIGURATION, **notes}
            )
    except Exception as error:
        raise Refused(first_line(error)) from error


def compile_package(
    exported: torch.export.ExportedProgram, path: Path, *, limit_s: float = LIMIT_S, cpu: str = ""
) -> None:
    """Compile an exported program to the package ``path``, whole or not at all.

    Inductor's cache lives in a temporary folder that is removed; precompiled headers of torch stay in a
    folder of the user's own in the system's temporary one. The package says which processor its integers
    were made for, where it has integers.

    Raises:
        Refused: Inductor or the C++ compiler refuses the program, crashes or takes too long.
    """
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
        if shutil.disk_usage(folder).free < _HEADER_BYTES:
            hint = "Make room there, or set TMPDIR to a folder with more."
            raise Refused(f"Inductor could not compile the program: '{folder.parent}' is full.", hint=hint) from error
        raise Refused(f"Inductor cannot compile the program ({reason}).", hint="Choose onnx or torchscript.") from error
