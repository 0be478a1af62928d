"""Taking over an untrusted model: a confined child opens and captures it, and what comes back is data.

`take_over` is the user's side, `take` the child's. A whole module, TorchScript or exported program comes back as a
captured `Program` (`stored`), already verified against the module; a state dict as named tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from optimize import sandbox
from optimize.dimensions import read_dynamic
from optimize.errors import InputsUnknown, OptimizeError, Refused, UsageError
from optimize.escaping import plain
from optimize.load import stored, untrusted, weights
from optimize.load.capturing import AS_USUAL, Capturing, Inputs, capture_model
from optimize.load.identify import Kind
from optimize.program import Program
from optimize.progress import Progress
from optimize.sandbox import ChildLimits

_INPUTS, _STATE = "inputs.safetensors", "state.safetensors"
_NOUNS = {Kind.EXPORTED: "exported program", Kind.TORCHSCRIPT: "TorchScript", Kind.ONNX: "ONNX"}
#: Those that may say themselves what they take.
_TELLING = (Kind.EXPORTED, Kind.ONNX)


@dataclass(frozen=True)
class Taken:
    """What an untrusted file held.

    Attributes:
        program: The captured model; None where the file holds a state dict, or was looked at alone.
        state: The tensors of a state dict by name; None where it holds none.
        noun: What it is, for a report.
        warnings: What the user should know.
    """

    program: Program | None
    state: dict[str, torch.Tensor] | None
    noun: str
    warnings: tuple[str, ...]


def take_over(
    path: Path,
    kind: Kind,
    inputs: Inputs,
    how: Capturing = AS_USUAL,
    *,
    progress: Progress | None = None,
) -> Taken:
    """Open and capture an untrusted file in a confined process.

    Args:
        kind: What `identify` said it is.
        inputs: Returns example inputs, or raises the error that says why there are none; asked only where the file
            may need some, and without arguments of the model, which nobody knows by then.
        progress: Told what is going on.

    Raises:
        OptimizeError: The file is refused, cannot be captured, or needs inputs that nobody gives.
    """
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        folder = Path(name)
        unknown = _write_inputs(folder, inputs) if kind is not Kind.EXPORTED else None
        taken = _ask(path, kind, how, folder, progress, unknown.sides if isinstance(unknown, InputsUnknown) else None)
    if taken.program is None and taken.state is None:
        raise unknown or Refused(f"'{path}' needs example inputs.", hint="Give --input-shape, such as 3,224,224.")
    return taken


def look(path: Path, kind: Kind) -> Taken:
    """Open an untrusted file in a confined process to learn what it is.

    Returns:
        A captured program of a ``.pt2``, the tensors of a state dict; of everything else what it is, and neither.

    Raises:
        OptimizeError: The file is refused.
    """
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        return _ask(path, kind, AS_USUAL, Path(name), None)


def _ask(
    path: Path, kind: Kind, how: Capturing, folder: Path, progress: Progress | None, guess: Sequence[int] | None = None
) -> Taken:
    arguments = {
        "path": str(path.absolute()),
        "name": str(path),
        "kind": kind.name,
        "how": asdict(how),
        "guess": guess,
    }
    answer = sandbox.call(
        "optimize.load.taking:take",
        arguments,
        folder,
        about=f"'{path}'",
        limits=ChildLimits.of([path]),
        progress=progress,
    )
    return _taken(path, folder, answer)


def _write_inputs(folder: Path, inputs: Inputs) -> OptimizeError | None:
    """Give the child example inputs, and return what to say if it needs some and there are none."""
    try:
        found = inputs({})
    except UsageError as error:
        return error
    tensors = {str(place): tensor.detach().contiguous().clone() for place, tensor in enumerate(found)}
    with stored.leaving("the example inputs"):
        save_file(tensors, folder / _INPUTS)
    return None


def _taken(path: Path, folder: Path, answer: sandbox.Answer) -> Taken:
    """Read what a child answered, which may be anything."""
    try:
        held, noun = str(answer.value["held"]), plain(str(answer.value["noun"]))
        warnings = tuple(plain(str(note)) for note in answer.value["warnings"])
    except (KeyError, TypeError) as error:
        raise Refused("The process that opened the file gave no answer.") from error
    warnings += tuple(f"The file was opened with {missing}." for missing in answer.missing)
    if held == "needs inputs":
        return Taken(None, None, noun, warnings)
    if held == "state":
        return Taken(None, stored.load_left(folder, _STATE, most_bytes=untrusted.most_bytes(path)), noun, warnings)
    return Taken(stored.restore(folder), None, noun, warnings)


def take(
    folder: Path,
    tell: Progress,
    path: str,
    name: str,
    kind: str,
    how: dict[str, Any],
    guess: Sequence[int] | None,
) -> dict[str, Any]:
    """Open and capture a file in this, confined, process; leave what it held in ``folder``.

    Where no inputs were given they may be guessed, with the sides of ``guess``, unless it is None.

    Returns:
        What it ``held`` (``state``, ``model`` or ``needs inputs``), its ``noun``, and ``warnings``.
    """
    torch.set_num_threads(1)
    tell("load", 0.0)
    held, notes = untrusted.open_untrusted(Path(path), Kind[kind], name)
    noun = _NOUNS.get(Kind[kind], "whole module")
    if Kind[kind] not in _NOUNS:
        held, more = weights.unwrap(held, name)
        notes += more
        if isinstance(held, Mapping):
            notes += _write_state(folder, held, name)
            return {"held": "state", "noun": "state dict", "warnings": notes}
    needs = {"held": "needs inputs", "noun": noun, "warnings": notes}
    if guess is None and not (folder / _INPUTS).exists() and Kind[kind] not in _TELLING:
        return needs
    tell("capture", 0.0)
    try:
        asked = Capturing(**{**how, "dynamic": read_dynamic(how["dynamic"]), "outputs": tuple(how["outputs"])})
        program = capture_model(held, lambda _: _read_inputs(folder, guess or ()), asked)
    except InputsUnknown as error:
        if guess is not None and error.hint:  # this process alone knows the model
            raise
        return needs
    tell("capture", 1.0)
    stored.store(program, folder)
    return {"held": "model", "noun": noun, "warnings": notes}


def _read_inputs(folder: Path, sides: Sequence[int]) -> tuple[torch.Tensor, ...]:
    path = folder / _INPUTS
    if not path.exists():
        raise InputsUnknown("Nothing says what the model takes.", sides=sides)
    found = load_file(path)
    return tuple(found[str(place)] for place in range(len(found)))


def _write_state(folder: Path, state: weights.StateDict, name: str) -> list[str]:
    """Write the tensors of a state dict, each with its own values, and return what was left out."""
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    try:
        with stored.leaving("the weights"):
            save_file({key: value.detach().contiguous().clone() for key, value in tensors.items()}, folder / _STATE)
    except (KeyError, ValueError, RuntimeError) as error:
        kinds = sorted({f"{value.dtype} {value.layout}" for value in tensors.values()})
        raise Refused(
            f"'{name}' holds weights that plain files do not hold ({', '.join(kinds)}).",
            hint="Add --trust if you trust this file.",
        ) from error
    left = [key for key in state if key not in tensors]
    return [f"Left out of the state dict, being no tensor: {', '.join(left[:4])}."] if left else []
