"""Times of the kernels in an AOTInductor package that was compiled to note them, joined to the graph by its C++.

Inductor writes above each call of a library kernel which nodes of the graph it computes, and names its own loops after
the operators they compute.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from optimize import graph
from optimize.program import Program
from optimize.targets.base import Probing, Runner
from optimize.targets.probe import TimedKernel, align, attribute, calls_of
from optimize.targets.pt2.coverage import Call
from optimize.targets.torch_probe import TorchProbe

#: A comment that names the nodes of the next library kernel, or the place where a kernel is called.
_LINES = re.compile(r'Source Nodes: \[([^\]]*)\]|KernelContextGuard _ctx\("(\w+)"')
_NOTED = re.compile(r"^graph_\d+_")


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
