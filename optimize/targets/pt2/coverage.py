"""What a package runs, read from the C++ that was compiled into it: which layers on integers, and for how long.

Inductor writes above each call of a library kernel which nodes of the graph it computes, and names its own loops after
the operators they compute. A package that was compiled to note its kernels tells their times.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimize import graph
from optimize.program import Program
from optimize.targets.base import Coverage, FloatLayer, Probing, Runner
from optimize.targets.packaging import float_layer
from optimize.targets.probe import TimedKernel, align, attribute, calls_of
from optimize.targets.pt2.lowering import SCALE
from optimize.targets.pt2.placement import InductorPlacement
from optimize.targets.torch_probe import TorchProbe

_CALL = re.compile(
    r"^\s+(?:AOTI_TORCH_ERROR_CODE_CHECK\()?(?:aoti_torch_cpu__?|aoti_torch_(?=proxy)|cpp_)(\w+)\((.*)$", re.MULTILINE
)
#: Calls an operator by its number in a table of the package.
_BY_NUMBER = "proxy_executor_call_function"
_INTEGER = re.compile(r"q(conv|linear)|quantized::")
_WEIGHTED = re.compile(r"convolution|linear")
#: Conversions, and moves that compute nothing, among the operators that name a loop.
_MOVES = re.compile(
    r"(?:^|_)(?:(?:de)?quantize_per_(?:tensor|channel)|_to_copy|reshape|view|flatten|permute|transpose|squeeze|"
    r"unsqueeze|slice|select|split_with_sizes|split|unbind|expand|cat|clone|constant_pad_nd)(?=_|$)"
)
#: A comment that names the nodes of the next library kernel, or the place where a kernel is called.
_LINES = re.compile(r'Source Nodes: \[([^\]]*)\]|KernelContextGuard _ctx\("(\w+)"')
_NOTED = re.compile(r"^graph_\d+_")


@dataclass(frozen=True)
class Call:
    """One kernel call of a package.

    Attributes:
        kernel: The function, such as ``qconv_pointwise_tensor``, ``fused_mean_quantize_per_tensor_2`` or
            ``quantized::max_pool2d``.
        arguments: Its arguments, in C++.
    """

    kernel: str
    arguments: str

    @property
    def is_integer(self) -> bool:
        """Whether it computes on integers."""
        return _INTEGER.match(self.kernel) is not None

    @property
    def computes(self) -> str:
        """The operators that a float kernel computes, empty where it only moves and converts values.

        >>> Call("fused_hardsigmoid_mul_quantize_per_tensor_4", "").computes
        'hardsigmoid_mul'
        """
        return _MOVES.sub("", re.sub(r"^fused_?|_?\d+$", "", self.kernel)).strip("_")


def read_calls(package: Path) -> list[Call]:
    """Return the kernel calls of a package, in order."""
    with zipfile.ZipFile(package) as archive:
        members = {name.partition(".wrapper.")[2]: name for name in archive.namelist()}
        code = archive.read(members["cpp"]).decode()
        table = json.loads(archive.read(members["json"]))["nodes"] if "json" in members else []
    calls = (Call(*found) for found in _CALL.findall(code))
    return [_named(call, table) if call.kernel == _BY_NUMBER else call for call in calls]


def _named(call: Call, table: Sequence[Mapping[str, Any]]) -> Call:
    number = int(call.arguments.split(",")[1])
    return Call(table[number]["node"]["target"], call.arguments)


def coverage(package: Path, placement: InductorPlacement) -> Coverage:
    """Return what a package runs on integers and what it does not, with the kernels counted.

    A layer runs on integers when an integer kernel reads its weight scales, which keep their names in the C++.

    Args:
        package: The compiled package.
        placement: What was to run on integers.
    """
    calls = read_calls(package)
    scales = (re.search(rf"\b(\w+){SCALE}\b", call.arguments) for call in calls if call.is_integer)
    integer = {found[1] for found in scales if found}
    reason = "inductor did not fuse it with its integer weights"
    lost = [float_layer(node, reason) for node in placement.weights if node.name not in integer]
    names = tuple(graph.origin(node) for node in placement.weights if node.name in integer)
    kernels = dict(sorted(Counter(call.kernel for call in calls).items()))
    return Coverage(names, (*placement.left_float, *lost, *_between(calls)), kernels)


def _between(calls: list[Call]) -> Iterator[FloatLayer]:
    """Yield the float kernels between the first integer kernel and the last, other than weighted layers."""
    places = [index for index, call in enumerate(calls) if call.is_integer]
    for call in calls[places[0] : places[-1]] if places else ():
        if not call.is_integer and call.computes and not _WEIGHTED.search(call.kernel):
            yield FloatLayer(call.kernel, call.computes, "inductor computes it in one float loop")


class PT2Probe(TorchProbe):
    """A package in this process, in torch's profiler.

    Args:
        runner: Of a file that was compiled under ``noting_kernels``.
        asked: Its inputs, and the program that was compiled.
    """

    def __init__(self, runner: Runner, asked: Probing) -> None:
        super().__init__(runner, asked)
        self._written = kernels_in(runner.artifact.path)

    def kernels(self, names: Sequence[str]) -> tuple[TimedKernel, ...]:
        """Return a kernel a call in the package's C++."""
        assert self._program is not None
        names = [_NOTED.sub("", name) for name in names]
        places = align(names, [name for name, _ in self._written])
        sources = [() if place is None else self._written[place][1] for place in places]
        found = attribute(calls_of(self._program), claims_of(names, sources, self._program))
        return tuple(TimedKernel(name, _short(name), mine) for name, mine in zip(names, found, strict=True))


def kernels_in(package: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return the kernels that a package calls, in order, with the nodes its C++ says each computes."""
    with zipfile.ZipFile(package) as archive:
        code = next(name for name in archive.namelist() if name.endswith(".wrapper.cpp"))
        text = archive.read(code).decode()
    found: list[tuple[str, tuple[str, ...]]] = []
    sources: tuple[str, ...] = ()
    for comment, kernel in _LINES.findall(text):
        if kernel:
            found.append((kernel, () if kernel.startswith("cpp_") else sources))
            sources = ()
        else:
            sources = tuple(filter(None, comment.split(", ")))
    return found


def claims_of(names: Sequence[str], sources: Sequence[Sequence[str]], program: Program) -> list[tuple[str, ...]]:
    """Return the call that each kernel is known to compute: the last of its comment, or by the operators of a loop."""
    claims = [tuple(nodes[-1:]) for nodes in sources]
    taken = {name for claim in claims for name in claim}
    free = [node for node in program.graph.nodes if node.op == "call_function" and node.name not in taken]
    waiting: Mapping[str, list[str]] = {graph.op_name(node): [] for node in free}
    for node in free:
        waiting[graph.op_name(node)].append(node.name)
    for index, name in enumerate(names):
        if name.startswith("cpp_"):
            computed = Call(name.removeprefix("cpp_"), "").computes
            claims[index] = tuple(nodes.pop(0) for op, nodes in waiting.items() if nodes and _computes(computed, op))
    return claims


def _computes(computed: str, op: str) -> bool:
    return re.search(rf"(?:^|_){re.escape(op)}(?=_|$)", computed) is not None


def _short(name: str) -> str:
    return name.removeprefix("aoti_torch_cpu_").removeprefix("aoti_torch_").strip("_")
