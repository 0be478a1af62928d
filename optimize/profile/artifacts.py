"""Profiling a file that a runtime takes as it is (.onnx, .xml), whose program is not at hand.

Layers are called as the file calls its nodes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from optimize import sandbox
from optimize.costs import Costs
from optimize.errors import Refused, UsageError
from optimize.measure.feed import open_feed
from optimize.measure.fleet import Progress, silent
from optimize.measure.sides import Side, open_side
from optimize.measure.worker import read_answer, write_arrays
from optimize.profile.kernels import Times, take_times
from optimize.profile.machine import Limits, measure_limits
from optimize.profile.profiling import fresh_process, join
from optimize.profile.result import Profile
from optimize.targets.base import Artifact, TensorSpec, file_digest

#: The target that runs a file, by the file's ending.
RUNTIMES = {".onnx": "onnx", ".xml": "openvino"}
#: For the repetitions of one file.
_PROFILING_S = 3600.0
_INPUTS = "inputs.npz"


def runtime_of(source: str) -> str | None:
    """Return the target that runs a file as it is; None where the source is to be captured."""
    return RUNTIMES.get(Path(source).suffix.lower())


def profile_file(
    path: Path,
    *,
    input_shape: str | None = None,
    batch: int = 1,
    threads: int = 1,
    limits: Limits | None = None,
    fresh: bool = True,
    trust: bool = False,
    progress: Progress = silent,
) -> Profile:
    """Return what one run of a file is made of, on noise.

    Args:
        path: An ``.onnx`` file, or an ``.xml`` of OpenVINO with its ``.bin`` beside it.
        input_shape: Sizes of one sample, such as ``3,224,224``, where the file leaves them free.
        batch: Samples in a run, where the file leaves that free.
        threads: Compute threads.
        limits: What this machine can do; measured when None.
        fresh: Also run the file in a process of its own, for its memory and first call.
        trust: Take whatever time and memory the file asks for.
        progress: Told what is going on.

    Raises:
        Refused: The file is missing, is refused by the checks of its kind, or cannot be run.
        UsageError: Nothing says what it takes.
        TargetUnavailable: Its runtime is not installed.
    """
    target = RUNTIMES[path.suffix.lower()]
    _check(path, target, trust)  # before the machine is measured, which takes its time
    machine = limits or measure_limits(threads)
    asked = {"path": str(path), "input_shape": input_shape, "batch": batch, "threads": threads, "trust": trust}
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        folder = Path(name)
        answer = sandbox.call(
            "optimize.profile.artifacts:profile_here",
            {**asked, "limits": asdict(machine)},
            folder,
            about=f"'{path}'",
            limits=sandbox.ChildLimits.of([path], seconds=_PROFILING_S, on_clock=True),
            confined=not trust,
            progress=progress,
        )
        try:
            found = TypeAdapter(Profile).validate_python(answer.value["profile"])
            specs = TypeAdapter(tuple[TensorSpec, ...]).validate_python(answer.value["takes"])
            inputs = read_answer(folder, _INPUTS)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Refused(f"The process that ran '{path}' gave no profile.") from error
    artifact = _artifact(path, specs, target, untrusted=not trust)
    return dataclasses.replace(found, fresh=fresh_process(artifact, inputs, threads, progress) if fresh else None)


def profile_here(
    folder: Path,
    tell: Progress,
    path: str,
    input_shape: str | None,
    batch: int,
    threads: int,
    trust: bool,
    limits: dict[str, Any],
) -> dict[str, Any]:
    """Profile a file in this process; leave the inputs in ``folder`` and return the figures as JSON holds them."""
    file = Path(path)
    target = RUNTIMES[file.suffix.lower()]
    side = open_side(path, trust=trust) if target == "onnx" else _openvino_side(file)
    inputs = _inputs(side, input_shape, batch)
    times, costs = (_onnx if target == "onnx" else _openvino)(file, inputs, threads, tell, folder)
    machine = TypeAdapter(Limits).validate_python(limits)
    found = join(times, costs, {}, machine, target=target, batch=len(inputs[0]))
    write_arrays(folder / _INPUTS, inputs)
    dumped = TypeAdapter(Profile).dump_python(found, mode="json")
    return {"profile": dumped, "takes": [asdict(spec) for spec in side.inputs]}


def _check(path: Path, target: str, trust: bool) -> None:
    """Refuse a file that its runtime must not see."""
    if target == "onnx":
        from optimize.targets.onnx.reading import read_checked

        read_checked(path, trust=trust)
    else:
        from optimize.targets.openvino.reading import check_ir

        check_ir(path, trust=trust)


def _inputs(side: Side, input_shape: str | None, batch: int) -> list[np.ndarray]:
    """Return noise for one run, the batch as asked where the file leaves it free."""
    feed = open_feed(side, side, input_shape=input_shape)
    arrays = next(iter(feed.batches(1)))
    free = all(isinstance(spec.shape[0], str) for spec in side.inputs)
    if free:
        return [np.concatenate([array] * batch) for array in arrays]
    if batch not in (1, len(arrays[0])):
        raise UsageError(f"'{side.path}' takes a batch of {len(arrays[0])} and no other.", hint="Leave --batch out.")
    return arrays


def _onnx(
    path: Path, inputs: Sequence[np.ndarray], threads: int, progress: Progress, folder: Path
) -> tuple[Times, Costs]:
    from optimize.profile.names import onnx_names
    from optimize.profile.onnx_costs import onnx_costs
    from optimize.profile.onnx_runtime import OnnxProbe

    probe = OnnxProbe(path, inputs, onnx_names(path), folder, threads=threads)
    return take_times(probe, progress=progress), onnx_costs(path, inputs)


def _openvino(
    path: Path, inputs: Sequence[np.ndarray], threads: int, progress: Progress, folder: Path
) -> tuple[Times, Costs]:
    from optimize.profile.openvino_runtime import OpenVinoProbe

    probe = OpenVinoProbe(path, inputs, None, threads=threads)
    return take_times(probe, progress=progress), Costs({}, frozenset())


class _OpenVinoSide(Side):
    """What an IR file takes; it is run by its probe."""

    @property
    def kind(self) -> str:
        """What the file is, in words."""
        return "OpenVINO IR"

    def _run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        raise NotImplementedError


def _openvino_side(path: Path) -> Side:
    from optimize.targets.openvino.reading import inputs_here

    return _OpenVinoSide(path, inputs_here(path), ())


def _artifact(path: Path, takes: tuple[TensorSpec, ...], target: str, *, untrusted: bool) -> Artifact:
    digest, size = file_digest(path), path.stat().st_size
    return Artifact(target, path, takes, (), "float32", digest, size, out_spec="", untrusted=untrusted)
