"""What went wrong, where, why, and what to do next: the only errors that reach a user."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


class OptimizeError(Exception):
    """A failure with an exit code and a next step.

    Args:
        what: One clear sentence: what failed, where and why.
        hint: What the user can do next; shown on its own line.
    """

    exit_code = 1

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n{self.hint}" if self.hint else self.what


class Refused(OptimizeError):
    """The input is understood and cannot be done, or must not be done (exit code 1)."""


class InputsMisfit(Refused):
    """The model fails on its example inputs, by these ``causes``; ``advice`` is for whoever gave them (exit code 1)."""

    def __init__(self, what: str, *, causes: str, advice: str) -> None:
        super().__init__(what, hint=f"{causes} {advice}".strip())
        self.causes = causes


class UsageError(OptimizeError):
    """The command, recipe or arguments are wrong (exit code 2)."""

    exit_code = 2


class InputsUnknown(UsageError):
    """Nothing says what the model takes; its layers may, beside the ``sides`` of pictures (exit code 2)."""

    def __init__(self, what: str, *, hint: str = "", sides: Sequence[int] = ()) -> None:
        super().__init__(what, hint=hint)
        self.sides = sides


class VerificationFailed(OptimizeError):
    """A transformed program broke an invariant or its declared tolerance (exit code 3)."""

    exit_code = 3


class TargetUnavailable(OptimizeError):
    """A backend is not installed or cannot run on this machine (exit code 4)."""

    exit_code = 4


class Defect(OptimizeError):
    """This package did what it must not do; the model and the command are not to blame (exit code 70)."""

    exit_code = 70


def as_fields(error: OptimizeError) -> dict[str, str]:
    """Return an error as plain data that another process makes the same error of."""
    return {"error": type(error).__name__, "what": error.what, "hint": error.hint}


def from_fields(fields: Mapping[str, Any]) -> OptimizeError:
    """Return the error that another process raised; a defect, and any class that is none of these, is a refusal here.

    >>> from_fields({"error": "UsageError", "what": "No target was given."})
    UsageError('No target was given.')
    """
    kinds = {kind.__name__: kind for kind in OptimizeError.__subclasses__() if kind is not Defect}
    what, hint = (str(fields.get(key, "")) for key in ("what", "hint"))
    return kinds.get(str(fields.get("error")), Refused)(what, hint=hint)


def require(value: object, kind: type, what: str, hint: str) -> None:
    """Check that what a function was given is what it takes.

    Raises:
        UsageError: It is not.

    >>> require("net.pth", dict, "net", "Load it first.")
    Traceback (most recent call last):
    optimize.errors.UsageError: net: a dict is wanted, not a str.
    Load it first.
    """
    if not isinstance(value, kind):
        found = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise UsageError(f"{what}: a {kind.__name__} is wanted, not {found}.", hint=hint)


#: Names in a hint; of more, the first few are enough.
_LISTED = 32
#: Files that are not the user's own: installed packages, Python's library, and this package.
_ROOTS = (re.escape(os.path.join(os.path.dirname(file), "")) for file in (os.__file__, __file__))
_INSTALLED = re.compile("|".join((r"[\\/](site|dist)-packages[\\/]", *_ROOTS)))
#: How native libraries say that they got no memory.
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
    "memory allocation of",
)


def lacks_memory(error: BaseException) -> bool:
    """Say whether an error means that there was no memory, in whichever library's words.

    >>> lacks_memory(MemoryError()), lacks_memory(RuntimeError("DefaultCPUAllocator: not enough memory: ..."))
    (True, True)
    >>> lacks_memory(RuntimeError("shapes do not fit"))
    False
    """
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _NO_MEMORY)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says (TorchScript's last), without colours; its type where there is none.

    >>> first_line(ValueError("\\n no such size\\n at 0x1")), first_line(KeyError())
    ('no such size', 'KeyError')
    >>> first_line(RuntimeError("It failed in the TorchScript interpreter.\\n  return x\\nRuntimeError: no such size"))
    'no such size'
    """
    lines = [line.strip() for line in re.sub(r"\x1b\[[\d;]*m", "", str(error)).splitlines() if line.strip()]
    if lines and lines[0].endswith("in the TorchScript interpreter."):  # its cause stands behind two tracebacks
        return re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1])
    return lines[0] if lines else type(error).__name__


def in_one_line(error: BaseException) -> str:
    """Return all that an error says as the end of a sentence, without the full stop, or its type.

    >>> in_one_line(ValueError("no such\\n size."))
    'no such size'
    """
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def spell(error: BaseException) -> str:
    """Return the type of an error and its first line as the end of a sentence, without the full stop.

    >>> spell(ValueError("no such size.")), spell(ImportError())
    ('ValueError: no such size', 'ImportError')
    """
    return ": ".join(dict.fromkeys((type(error).__name__, first_line(error).rstrip("."))))


def raised(what: str, error: BaseException, hint: str = "") -> Refused:
    """Return what code of the user's raised as a refusal; an import that failed in it with the line that asks for it.

    Args:
        what: The code that was run.
        error: What it raised.
        hint: What to do about any other error.
    """
    if not isinstance(error, ImportError):
        return Refused(f"{what} raised {spell(error)}.", hint=hint)
    errors: list[BaseException] = [error]
    while isinstance(error, ImportError) and not error.name and error.__cause__ and error.__cause__.__traceback__:
        error = error.__cause__  # packages that import late, as transformers does, tell it in words of their own
        errors.append(error)
    import traceback  # not in a worker, whose memory is measured, before it is needed

    walked = [(at.f_code.co_filename, line) for one in errors for at, line in traceback.walk_tb(one.__traceback__)]
    last, *others = [place for place in reversed(walked) if not place[0].startswith("<frozen importlib")]
    own = next((place for place in (last, *others) if not _INSTALLED.search(place[0])), last)
    places = " through ".join(f"{file}, line {line}" for file, line in dict.fromkeys((own, last)))
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    advice = f"Install '{name}', or mend" if name else "Mend"
    return Refused(f"{what} raised {spell(error)}, in {places}.", hint=f"{advice} that import.")


@contextlib.contextmanager
def blaming(what: str, hint: str = "", *, of: type[Exception] = Exception) -> Iterator[None]:
    """Tell what the user's own code raises as a sentence; an end of the interpreter, too: it might look like success.

    Args:
        what: The code that is run.
        hint: What to do about an error ``of`` this kind.
        of: The kind.

    Raises:
        Refused: It raised something; an error of ours stays what it is.

    >>> with blaming("The metric 'f1'"):
    ...     raise SystemExit(0)
    Traceback (most recent call last):
    optimize.errors.Refused: The metric 'f1' raised SystemExit: 0.
    """
    try:
        yield
    except OptimizeError:
        raise
    except (Exception, SystemExit) as error:
        raise raised(what, error, hint if isinstance(error, of) else "") from error


@contextlib.contextmanager
def looking_up() -> Iterator[None]:
    """Tell a number in data for which an embedding has no row as what it is.

    Raises:
        Refused: There is one.
    """
    try:
        yield
    except Exception as error:
        if "index out of range in self" not in str(error):  # torch's words for it, also behind those of TorchScript
            raise
        what = "The model looks up a row that its table does not have: a token or class of the data is too large."
        raise Refused(what, hint="Does the data go with this model? Texts need its own tokenizer.") from error


#: Where the traceback of an error in somebody else's code is seen.
_TRACEBACK = {
    "pass": "The command shows the traceback with --debug.",
    "target": "optimize.export(...).load() shows the traceback in Python.",
}


def is_foreign(owner: type) -> bool:
    """Say whether a class is of another package than this one."""
    return owner.__module__.partition(".")[0] != "optimize"


def named_with_package(kind: str, name: str, owner: type) -> str:
    """Return what a pass or a target is called, with the package that its class is of where that is another.

    >>> named_with_package("pass", "Error", OptimizeError)
    'The pass Error'
    """
    package = owner.__module__.partition(".")[0]
    return f"The {kind} {name}" + ("" if package in ("optimize", "__main__") else f" of the package '{package}'")


@contextlib.contextmanager
def attributed(kind: str, name: str, owner: type) -> Iterator[None]:
    """Tell an error in a pass or a target of another package as its own, in its words and with its line.

    Args:
        kind: ``pass`` or ``target``.
        name: What it is called.
        owner: Its class.

    Raises:
        Refused: There was one.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OptimizeError) or lacks_memory(error) or not is_foreign(owner):
            raise
        import traceback  # not in a worker, whose memory is measured, before it is needed

        walked = [(at.f_globals.get("__name__", ""), line) for at, line in traceback.walk_tb(error.__traceback__)]
        package = owner.__module__.partition(".")[0]
        frames = [(module, line) for module, line in walked if module.partition(".")[0] == package]
        place = " in {}, line {}".format(*frames[-1]) if frames else ""
        raise Refused(
            f"{named_with_package(kind, name, owner)} failed{place}: {spell(error)}.",
            hint=f"It is the {kind} that failed, not the model: mend it, or leave it out to go on. {_TRACEBACK[kind]}",
        ) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names the nearest known name, or all of them.

    >>> nearest("tensort", ["onnx", "tensorrt"])
    "Did you mean 'tensorrt'? Known: onnx, tensorrt."
    >>> nearest("ONNX", ["onnx", "tensorrt"]), nearest("x", [])
    ("Did you mean 'onnx'? Known: onnx, tensorrt.", 'Known: none.')
    >>> nearest("calib", ["calibration", "calibrator"])
    "Did you mean 'calibration'? Known: calibration, calibrator."
    >>> nearest("zzz", ["onnx", "tensorrt"])
    'Known: onnx, tensorrt.'
    >>> nearest("layer_7", [f"layer{number}" for number in range(100)])
    "Did you mean 'layer7'? Known: layer0, layer1, layer10, layer11 and 96 more."
    """
    names = sorted(known)
    lowered = {known.lower(): known for known in names}
    begun = [full for full in lowered if name and full.startswith(name.lower())]
    close = [lowered[one] for one in begun[:1] or difflib.get_close_matches(name.lower(), lowered, n=1)]
    start = f"Did you mean '{close[0]}'? " if close else ""
    listed = ", ".join(names) if len(names) <= _LISTED else f"{', '.join(names[:4])} and {len(names) - 4} more"
    return f"{start}Known: {listed or 'none'}."
