"""The line of a profile: costs from the graph, an artifact, its kernels' times, both joined by name."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.costs import Costs, program_costs
from optimize.errors import UsageError
from optimize.measure.fleet import Fleet
from optimize.measure.latency import Timing, measure
from optimize.measure.subjects import running
from optimize.profile.kernels import Times, take_times
from optimize.profile.machine import MachineLimits, measure_limits, torch_threads
from optimize.profile.result import FreshProcess, KernelProfile, Profile, PythonCost, live_memory, python_cost
from optimize.program import Program
from optimize.progress import Progress, silent
from optimize.registry import find_target, targets
from optimize.targets.arrays import to_array
from optimize.targets.base import Artifact, Probing
from optimize.targets.probe import TimedKernel

_FRESH_BUDGET_S = 1.0
#: What a runtime calls an operator that no file names, such as ``Subtract_46``.
_NUMBERED = re.compile(r"[A-Z][A-Za-z]*_\d+")
#: What runtimes call the types that ``MachineLimits`` knows.
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "u8": "int8", "i8": "int8"}


def require_times(target: str) -> None:
    """Check that a target's runtime tells the time of each kernel.

    Raises:
        UsageError: It does not.
    """
    if not find_target(target).profiled:
        names = [name for name, entry in targets().items() if entry.profiled]
        raise UsageError(
            f"The time of each layer cannot be taken on the target '{target}'.",
            hint=f"One of {', '.join(names)}; for TensorRT use its own trtexec --dumpProfile on the engine.",
        )


def profile_program(
    program: Program,
    target: str = "eager",
    *,
    batch: int = 1,
    threads: int = 1,
    limits: MachineLimits | None = None,
    fresh: bool = True,
    progress: Progress = silent,
) -> Profile:
    """Export a program and return what one run of the artifact is made of.

    Args:
        program: The captured model, in float.
        target: One that is ``profiled``.
        batch: Samples in a run; a program with a fixed batch keeps it.
        threads: Compute threads.
        limits: What this machine can do; measured when None.
        fresh: Also run the artifact in a process of its own, for its memory and first call.
        progress: Told what is going on.

    Raises:
        UsageError: The target's runtime does not tell the time of each kernel.
        TargetUnavailable: The runtime is not installed.
        Refused: The target lacks something the program uses, or fails while it runs it.
    """
    require_times(target)
    size = batch if program.batch else program.samples
    costs = program_costs(program, size)
    with tempfile.TemporaryDirectory(prefix="optimize-") as name, torch_threads(threads):
        artifact = _export(program, target, Path(name), progress)
        arrays = [to_array(tensor) for tensor in program.sample(batch)]
        with running(artifact.path):
            probe = find_target(target).probe(Probing(artifact, arrays, Path(name), threads, program))
            times = take_times(probe, progress=progress)
        process = FreshProcess.of(run_fresh(artifact, arrays, threads, progress)) if fresh else None
        python = _python(program, program.sample(batch)) if target == "eager" else None
    progress("machine", 0.0)
    layers = {node.name: graph.origin(node) for node in program.graph.nodes}
    return dataclasses.replace(
        join(times, costs, layers, limits or measure_limits(threads), target=target, batch=size),
        fresh=process,
        live=live_memory(program, size),
        python=python,
    )


def join(
    times: Times, costs: Costs, layers: Mapping[str, str], limits: MachineLimits, *, target: str, batch: int
) -> Profile:
    """Return a profile: each kernel with its layers and what they cost.

    Args:
        times: Of the kernels.
        costs: Of the calls of the graph.
        layers: Path of the module of each call.
        limits: What this machine can do.
        target: The runtime.
        batch: Samples in the run.
    """
    served = list(_served(times.kernels))
    rows = [
        _row(kernel, seconds, float(start), costs, layers, serves)
        for kernel, seconds, start, serves in zip(
            times.kernels, times.seconds, times.typical.starts_s, served, strict=True
        )
    ]
    return Profile(
        target=target,
        batch=batch,
        threads=limits.threads,
        total_s=times.total_s,
        clock=times.clock,
        runs=times.runs,
        kernels=tuple(rows),
        limits=limits,
    )


def _export(program: Program, target: str, folder: Path, progress: Progress) -> Artifact:
    progress(f"export {target}", 0.0)
    backend = find_target(target)
    with backend.noting_kernels():
        return backend.write(program, folder / f"model{backend.suffix}")


def run_fresh(artifact: Artifact, inputs: Sequence[np.ndarray], threads: int, progress: Progress) -> Timing:
    """Run the artifact for a second in a process of its own."""
    with Fleet([artifact], threads=threads, progress=progress) as fleet:
        return measure(fleet, inputs, budget_s=_FRESH_BUDGET_S).timings[0]


def _python(program: Program, inputs: Sequence[torch.Tensor]) -> PythonCost | None:
    """Profile the user's module; None where the program came from a file that holds none."""
    if program.source is None:
        return None
    arguments, keywords = pytree.tree_unflatten(list(inputs), program.in_spec)
    source = program.source
    with torch.inference_mode():
        return python_cost(lambda: source(*arguments, **keywords))


def _served(kernels: Sequence[TimedKernel]) -> Iterator[tuple[str, ...]]:
    """Yield for each kernel that computes no call the calls of the next one that does, or of the one before."""
    for index, kernel in enumerate(kernels):
        behind = (other.nodes for other in kernels[index:] if other.nodes)
        before = (other.nodes for other in reversed(kernels[:index]) if other.nodes)
        yield () if kernel.nodes else next(behind, ()) or next(before, ())


def _paths(nodes: Sequence[str], layers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules of some calls, each once; what a runtime numbered itself only where there is no other."""
    found = dict.fromkeys(layers.get(name, name) for name in nodes)
    return tuple(path for path in found if not _NUMBERED.fullmatch(path)) or tuple(found)


def _row(
    kernel: TimedKernel, seconds: float, start_s: float, costs: Costs, layers: Mapping[str, str], serves: Sequence[str]
) -> KernelProfile:
    calls = [costs.calls[name] for name in kernel.nodes if name in costs.calls]
    main = max(calls, key=lambda call: call.macs, default=None)
    return KernelProfile(
        name=kernel.name,
        op=kernel.op,
        layers=_paths(kernel.nodes, layers),
        serves=_paths(serves, layers),
        nodes=kernel.nodes,
        seconds=seconds,
        start_s=start_s,
        dtype=_DTYPES.get(kernel.dtype, kernel.dtype) or (main.dtype if main else ""),
        macs=sum(call.macs for call in calls) if calls else None,
        moved_bytes=costs.fused_bytes(kernel.nodes) if calls else None,
    )
