"""Opening a model: a file or a factory becomes a captured program, checked against the module it came from.

What the user vouches for (a module, a factory, a file with ``--trust``) is opened in this process. Everything else is
opened in a confined one and comes back as data (`taking`).
"""

from __future__ import annotations

from dataclasses import dataclass

from optimize.load import Loaded, ModelSource, load_state, load_trusted
from optimize.load.capturing import AS_USUAL, Capturing, Inputs, capture_model
from optimize.load.taking import take_over
from optimize.program import Program
from optimize.progress import Progress, silent


@dataclass(frozen=True)
class CapturedModel:
    """The captured model and where it came from."""

    program: Program
    source: str
    sha256: str | None = None
    warnings: tuple[str, ...] = ()


def capture_source(
    source: ModelSource, inputs: Inputs, how: Capturing = AS_USUAL, *, trust: bool = False, progress: Progress = silent
) -> CapturedModel:
    """Load and capture a file or what a factory makes.

    Args:
        source: What the user named.
        inputs: Asked where the source has no example inputs of its own.
        how: Which dimensions stay free.
        trust: Run the code that the file's pickles name.
        progress: Told how far it is.

    Raises:
        OptimizeError: It cannot be loaded or captured.
    """
    if source.kind is None or trust or source.is_plain:
        progress("load", 0.0)
        return _captured(load_trusted(source), inputs, how, progress)
    assert source.path is not None
    taken = take_over(source.path, source.kind, inputs, how, progress=progress)
    if taken.state is not None:
        return _captured(load_state(source, taken.state, taken.warnings), inputs, how, progress)
    assert taken.program is not None
    name = f"{source.path} ({taken.noun})"
    return CapturedModel(taken.program, name, source.sha256, (*taken.warnings, *source.unused_model))


def _captured(loaded: Loaded, inputs: Inputs, how: Capturing, progress: Progress) -> CapturedModel:
    progress("capture", 0.0)
    held = loaded.module if loaded.exported is None else loaded.exported
    program = capture_model(held, inputs, how)
    progress("capture", 1.0)
    return CapturedModel(program, loaded.source, loaded.sha256, loaded.warnings)
