"""Times of the kernels in an AOTInductor package that was compiled to note them, joined to the graph by its C++.

Inductor writes above each call of a library kernel which nodes of the graph it computes, and names its own loops after
the operators they compute.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from optimize import graph
from optimize.profile.join import align, attribute, calls_of
from optimize.profile.kernels import Kernel, Probe, Run
from optimize.profile.torch_runtime import alike, operators, read_run, record_runs
from optimize.program import Program
from optimize.targets.pt2.coverage import Call

#: A comment that names the nodes of the next library kernel, or the place where a kernel is called.
_LINES = re.compile(r'Source Nodes: \[([^\]]*)\]|KernelContextGuard _ctx\("(\w+)"')
_NOTED = re.compile(r"^graph_\d+_")
_VARIABLE = "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"


class PT2Probe(Probe):
    """A package in this process, in torch's profiler.

    Args:
        call: Takes flat tensors.
        package: The file, compiled under ``noting_kernels``.
        inputs: Of every run.
        program: What was compiled.
    """

    def __init__(
        self, call: Callable[..., Any], package: Path, inputs: Sequence[torch.Tensor], program: Program
    ) -> None:
        self._call, self._inputs, self._program = call, tuple(inputs), program
        self._written = kernels_in(package)
        self._runs: list[list[Any]] = []

    def run(self) -> None:
        """Run once."""
        with torch.inference_mode():
            self._call(*self._inputs)

    def profile(self, times: int) -> None:
        """Run so many times with the profiler."""
        self._runs += record_runs(self.run, times)

    def finish(self) -> tuple[tuple[Kernel, ...], list[Run]]:
        """Return a kernel a call in the package's C++."""
        runs = alike(self._runs)
        names = [_NOTED.sub("", event.name) for event in operators(runs[0])]
        places = align(names, [name for name, _ in self._written])
        sources = [() if place is None else self._written[place][1] for place in places]
        found = attribute(calls_of(self._program), claims_of(names, sources, self._program))
        kernels = tuple(Kernel(name, _short(name), mine) for name, mine in zip(names, found, strict=True))
        return kernels, [read_run(events) for events in runs]


@contextmanager
def noting_kernels() -> Iterator[None]:
    """Let packages compiled meanwhile tell torch's profiler when each kernel runs."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


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
