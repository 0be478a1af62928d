"""Opens a file as the product does, and says whose process each step belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import fx, nn

from optimize.errors import OptimizeError
from optimize.load import ModelSource, exported, load_trusted, operators, stored, taking, untrusted
from optimize.load.capturing import AS_USUAL
from optimize.load.identify import Kind, identify
from tests.fuzzing import networks
from tests.fuzzing.honest import INPUTS

#: Operators of TorchScript that do more than compute: none of them is in a file that opens.
_ACTING = re.compile(
    r"aten::(save|from_file|_?save\w*|load\w*|manual_seed|hash|input|eval)|prim::(Print|fork|rpc\w*|PythonOp)"
    r"|(?!aten|prim|quantized)\w+::\w+"
)
_FACTORY = "tests.fuzzing.rules:dense"


@dataclass(frozen=True)
class Here:
    """Where a case is opened.

    Attributes:
        folder: The only one that may be written in.
        belongs: Told whose process the next step belongs to: ``user`` or ``confined``.
        deep: Go on to capturing and running, which takes long.
    """

    folder: Path
    belongs: Callable[[str], None]
    deep: bool


class Unlisted(Exception):
    """A file opened as something that calls what no file may call."""


def dense() -> nn.Module:
    """Return the network that the state dicts and safetensors belong to."""
    return networks.plain()[0]


def open_torch(path: Path, here: Here) -> None:
    """Open a file of torch: identified by the user's process, taken over by a confined one, restored by the user's.

    Raises:
        OptimizeError: It is refused.
        Unlisted: It must not have opened.
    """
    here.belongs("user")
    kind = identify(path)
    if kind is Kind.SAFETENSORS:
        load_trusted(ModelSource.of(path, model=_FACTORY))
        return
    here.belongs("confined")
    if here.deep or kind in (Kind.CHECKPOINT, Kind.LEGACY):
        _take(path, kind, here)
        return
    held, _ = untrusted.open_untrusted(path, kind, "it")
    if isinstance(held, exported.Exported):
        _check_listed(held.module)
    elif isinstance(held, torch.jit.ScriptModule):
        _check_script(held)


def _take(path: Path, kind: Kind, here: Here) -> None:
    """Do what the confined process does, and what the user's makes of the answer.

    A module is captured in a deep case alone, which takes a hundred times as long as to read it: on inputs that are
    guessed.
    """
    if here.deep and kind is Kind.TORCHSCRIPT:
        save_file({"0": torch.ones(INPUTS)}, here.folder / "inputs.safetensors")
    how = asdict(AS_USUAL)
    answer = taking.take(here.folder, lambda phase, share: None, str(path), "it", kind.name, how, here.deep)
    if answer["held"] == "model":
        here.belongs("user")
        _check_listed(stored.restore(here.folder).graph_module)


def _check_listed(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function":
            try:
                operators.name_of(node.target)
            except operators.NotListed as error:
                raise Unlisted(str(error)) from error
        elif node.op not in ("placeholder", "get_attr", "output"):
            raise Unlisted(f"{node.op} {node.target}")


def _check_script(module: torch.jit.ScriptModule) -> None:
    for child in module.modules():
        names = child._c._method_names() if isinstance(child, torch.jit.ScriptModule) else []
        for kind in (kind for name in names for kind in _kinds(child._c._get_method(name).graph)):
            if _ACTING.fullmatch(kind):
                raise Unlisted(kind)


def _kinds(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)


def open_taken(path: Path, here: Here) -> None:
    """Read what a confined process left, whoever wrote it.

    Raises:
        OptimizeError: It is refused.
        Unlisted: It must not have opened.
    """
    here.belongs("user")
    _check_listed(stored.restore(path.parent).graph_module)


def open_onnx(path: Path, here: Here) -> None:
    """Open an ONNX file: checked and read by the user's process, run by a confined one.

    Raises:
        OptimizeError: It is refused.
    """
    from optimize.measure.openers import open_side
    from optimize.targets.onnx.reading import files_of
    from optimize.targets.onnx.values import read_values

    here.belongs("user")
    files_of(path)
    read_values(path)
    if here.deep:
        here.belongs("confined")
        open_side(str(path))


def open_openvino(path: Path, here: Here) -> None:
    """Open a description of OpenVINO: checked by the user's process, read and compiled by a confined one.

    Raises:
        OptimizeError: It is refused.
    """
    from optimize.targets.openvino.reading import check_ir, ends_here
    from optimize.targets.openvino.runner import import_runtime

    here.belongs("user")
    check_ir(path)
    here.belongs("confined")
    ends_here(path)
    if here.deep:
        try:
            import_runtime().Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1})
        except RuntimeError as error:
            raise OptimizeError(str(error)) from error


def open_arrays(path: Path, here: Here) -> None:
    """Read data to its end.

    Raises:
        OptimizeError: It is refused.
    """
    from optimize.data import open_data
    from optimize.data.conform import InputSpec

    here.belongs("user")
    found: Any = open_data(str(path), inputs=[InputSpec("x", (6,))])
    for _ in found.batches(2):
        continue
