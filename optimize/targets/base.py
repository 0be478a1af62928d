"""The contract every target keeps: export a program to a file, and load the file as a runner."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from optimize import processor, wording
from optimize.errors import Refused, TargetUnavailable, attributed, is_foreign, named_with_package
from optimize.quantization.numerics import USUAL, Numerics
from optimize.targets.arrays import to_array, to_tensor

if TYPE_CHECKING:
    import torch

    from optimize.plan import Quantization
    from optimize.program import Program
    from optimize.targets.probe import Probe


Basis = Literal["output", "name", "layer", "position"]


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be used here.

    Attributes:
        export: The file can be written on this machine.
        run: The file can be executed on this machine.
        version: Versions of the backend's packages, by name.
        reason: Why something is not possible, empty otherwise.
        install: The exact command that would make it possible, empty otherwise.
    """

    export: bool
    run: bool
    version: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    install: str = ""


@dataclass(frozen=True)
class Support:
    """What one target writes and its runtime runs, in the words of the files' precisions.

    Attributes:
        floats: Float types of a whole file: ``float32``, ``float16``, ``bfloat16``.
        int8: Kinds of INT8: ``static`` (calibrated), ``dynamic``, ``weights`` (weights alone).
        mixed: Float types beside static INT8 in one file, float32 apart.
        free: Dimensions that a file leaves free.
        remark: What else decides, as a sentence.
    """

    floats: tuple[str, ...] = ("float32",)
    int8: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    free: str = "batch, height, width"
    remark: str = ""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions as files carry them in their names."""
        kinds = tuple("int8" if kind == "static" else f"int8-{kind}" for kind in self.int8)
        return (*self.floats, *kinds, *(f"int8-{dtype}" for dtype in self.mixed))


#: What many a row of ``Support`` holds.
FLOATS, HALVES = ("float32", "float16", "bfloat16"), ("float16", "bfloat16")
#: Elements of arrays that are given to files of others, by NumPy's names, and dimensions that arrays have at most.
NUMBERS = frozenset(
    {"bool", "int8", "uint8", "bfloat16", *(f"{of}{bits}" for of in ("int", "uint", "float") for bits in (16, 32, 64))}
)
MOST_DIMENSIONS = 64
#: How much work and memory a file may ask for by itself before ``--trust`` is needed. Nodes that are executed, each as
#: often as the loops around it run, and steps of recurrent layers; elements of one value of a stated size, and of all
#: that is computed from constants (beyond what is stored).
MOST_STEPS, MOST_ELEMENTS = 10_000_000, 2**28
#: What to do about a file that asks for more.
HINT = "Do not open this file, unless you know who made it and why it is so: then add --trust."
INT8 = ("static", "dynamic", "weights")
#: What a file says of itself: the processors its integers are right on, how pictures become its inputs, and what it
#: does of that by itself.
SAID = ("cpu", "preprocess", "included")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an artifact.

    Attributes:
        name: Its name in the file.
        shape: Sizes; a string names a free dimension.
        dtype: NumPy's name of the element type, such as ``float32``.
        tokens: How many tokens its integers may name, where the file says so.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    tokens: int | None = None

    def __str__(self) -> str:
        """Return it as a reader sees it.

        >>> str(TensorSpec("x", ("batch", 3), "float32"))
        'x float32[batch, 3]'
        """
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"

    def checked(self, array: np.ndarray) -> np.ndarray:
        """Return the array, checked against what the artifact takes.

        Raises:
            Refused: Its shape or dtype does not fit.
        """
        fits = array.ndim == len(self.shape) and all(
            isinstance(want, str) or want == got for want, got in zip(self.shape, array.shape, strict=True)
        )
        if not fits:
            raise Refused(f"Input '{self.name}' must have shape {list(self.shape)}; got {list(array.shape)}.")
        if array.dtype.name != self.dtype:
            raise Refused(f"Input '{self.name}' must be {self.dtype}; got {array.dtype.name}.")
        return array

    @classmethod
    def told(cls, name: Any, shape: Any, dtype: Any) -> TensorSpec:
        """Return what another process says of an input or output, which may be anything.

        Raises:
            ValueError: It is no name, no sizes or no type.
        """
        sizes = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS and all(map(_is_size, shape))
        if not isinstance(name, str) or not sizes or dtype not in NUMBERS:
            raise ValueError(name, shape, dtype)
        return cls(name, tuple(shape), dtype)


def _is_size(size: Any) -> bool:
    return size == "?" or (type(size) is int and 0 <= size < 2**63)


@dataclass(frozen=True)
class FloatLayer:
    """A layer that was asked to be quantized and runs in float.

    Attributes:
        name: Module path or node name.
        op: Operator, in the runtime's own word.
        reason: Why, as a sentence without a full stop.
    """

    name: str
    op: str
    reason: str


@dataclass(frozen=True)
class Coverage:
    """What the runtime really executes in INT8, read from the graph it runs.

    Attributes:
        quantized: Names of the layers executed by integer kernels.
        left_float: The weighted layers, and the operators between quantized ones, that run in float.
        kernels: How often each kernel is executed, such as ``{"QLinearConv": 15, "Softmax": 1}``.
        source: What it was read from where that is no graph that runs, such as ``parsed network``.
    """

    quantized: tuple[str, ...] = ()
    left_float: tuple[FloatLayer, ...] = ()
    kernels: Mapping[str, int] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class TypedLayer:
    """One layer of a deployed file and the types it works on.

    Attributes:
        name: Its name, or those of the layers that were fused to it.
        op: What it is, in the runtime's own word.
        precision: Type it computes in, such as ``int8``.
        output: Type it writes.
        kernel: What executes it, where that is known before it runs.
    """

    name: str
    op: str
    precision: str
    output: str
    kernel: str = ""


@dataclass(frozen=True)
class LayerTypes:
    """The layers of a deployed file and their types.

    Attributes:
        source: What they were read from, such as ``engine inspector``.
        layers: In execution order.
    """

    source: str
    layers: tuple[TypedLayer, ...]


@dataclass(frozen=True)
class Artifact:
    """A deployed file and what is needed to load it.

    Attributes:
        target: Name of the target that wrote it.
        path: The file.
        inputs: What it takes, in order.
        outputs: What it returns, in order (flat).
        precision: ``float32``, ``float16``, ``bfloat16`` or a quantization plan's, such as ``int8``.
        sha256: Hash of the file (and of the weights after it, where they are a file of their own), hexadecimal.
        size_bytes: Size of the file (external data included).
        out_spec: How flat outputs become what the module returned: ``torch.utils._pytree.treespec_dumps``; a tuple
            where classes of its own hold them.
        versions: Packages that wrote it, by name.
        coverage: What runs in INT8; None for a float artifact.
        notes: What the report should say about it.
        in_spec: How the module's ``(args, kwargs)`` flatten, written like ``out_spec``; empty where not known.
        layer_types: Its layers with their types, where the backend tells them.
        providers: What executes it where the runtime has a choice, read from it, the preferred one first.
        settings: What its runner is asked, by the target's options.
        untrusted: Whether somebody else may have made it: then it is run in a confined process alone.
        missing: Why it cannot run here, where that was seen when it was opened; empty otherwise.
        cpu: The processors its integers were made for (``processor.CPUS``), as the file says itself; empty of floats,
            and where nothing says it.
        preprocess: How pictures become its inputs, in the words of ``--preprocess``, as the file says itself.
        included: What it does of that by itself, likewise; it takes uint8 ``[N, H, W, C]`` then.
        beside: Other files that it consists of, by their names seen from the folder of ``path``.
        origins: Call of the program by the name of a node or a value of the file, where it was written in this process.
        is_lossy: Whether a lossy pass made its program, where it was written in this process.
    """

    target: str
    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    sha256: str
    size_bytes: int
    out_spec: str
    versions: Mapping[str, str] = field(default_factory=dict)
    coverage: Coverage | None = None
    notes: tuple[str, ...] = ()
    in_spec: str = ""
    layer_types: LayerTypes | None = None
    providers: tuple[str, ...] = ()
    settings: Mapping[str, str | bool] = field(default_factory=dict)
    untrusted: bool = False
    missing: str = ""
    cpu: str = ""
    preprocess: str = ""
    included: str = ""
    beside: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_lossy: bool = False

    def __repr__(self) -> str:
        """Return what it is, takes and returns, in a line; its attributes have the rest."""
        takes, returns = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        kind = f"{self.target} {self.precision}".rstrip()
        return f"Artifact({kind} {str(self.path)!r}, {wording.size(self.size_bytes)}: {takes} -> {returns})"

    @property
    def is_rounded(self) -> bool:
        """Whether it computes with fewer bits than float32, or otherwise than the original, as far as is known."""
        return self.is_lossy or self.precision not in ("", "float32", "float64")

    def load(self, *, threads: int | None = None) -> Runner:
        """Load the file in its own runtime.

        Raises:
            TargetUnavailable: The runtime is not installed or cannot run here.
        """
        from optimize.registry import find_target

        target = find_target(self.target)
        with target.answering():
            return target.load(self, threads=threads)


@dataclass(frozen=True)
class Probing:
    """An artifact to be run with its runtime's profiler.

    Attributes:
        artifact: The file.
        inputs: Flat arrays of every run.
        folder: An empty folder for what the profiler writes.
        threads: Compute threads.
        program: What was exported; None where only a file is known.
    """

    artifact: Artifact
    inputs: Sequence[np.ndarray]
    folder: Path
    threads: int
    program: Program | None = None


class Runner(ABC):
    """A loaded artifact: called like the module, on torch tensors or NumPy arrays (and answers in kind).

    Attributes:
        shared: Whether several threads may call one at the same time.
        providers: What it runs on, where its runtime says that, the preferred one first.
        notes: What its user must know of how it answers, as sentences.
    """

    shared: bool = False
    providers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact

    def __repr__(self) -> str:
        """Return what it runs."""
        return f"{type(self).__name__} of {self.artifact!r}"

    @abstractmethod
    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays. This is what is timed."""

    def answer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run for the answers, where time does not matter.

        Raises:
            Refused: It answers otherwise where it will be deployed than where it is measured.
        """
        return self.run(inputs)

    def is_changed(self) -> bool:
        """Say whether it is another one since it was loaded, where that can be seen."""
        return False

    def device_seconds(self, inputs: Sequence[np.ndarray], runs: int) -> list[float]:
        """Return the seconds that each run takes on a device of its own; nothing where there is none."""
        return []

    def answering(self) -> AbstractContextManager[None]:
        """Tell an error in runs meanwhile as that of the target's package, where it is another than this one."""
        return attributed("target", self.artifact.target, type(self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on what the module took; return what the module returned.

        Raises:
            Refused: The structure or the number of inputs, a shape or a dtype does not fit the artifact.
        """
        from torch.utils import _pytree as pytree

        specs, expected, flat = self.artifact.inputs, self.artifact.in_spec, pytree.tree_leaves((args, kwargs))
        named = dict(zip((spec.name for spec in specs), args, strict=False)) | kwargs
        if kwargs and len(args) + len(kwargs) == len(specs) and all(spec.name in named for spec in specs):
            flat = [named[spec.name] for spec in specs]  # by the names that the module's parameters had
        else:
            arranged = None
            with contextlib.suppress(ValueError):  # otherwise than at capture
                arranged = pytree.treespec_loads(expected).flatten_up_to((args, kwargs)) if expected else flat
            if arranged is None or len(flat) != len(specs):
                given = f"{len(args)} and, by name, {list(kwargs)}" if kwargs else str(len(flat))
                raise Refused(
                    f"The artifact takes {len(specs)} input(s) {[spec.name for spec in specs]}; got {given}.",
                    hint="Give them as the module took them when it was captured: in their order, or by the names it "
                    "had.",
                )
            flat = arranged
        wants_tensors = any(hasattr(value, "detach") for value in flat)
        arrays = [to_array(value) if hasattr(value, "detach") else np.asarray(value) for value in flat]
        arrays = [spec.checked(array) for array, spec in zip(arrays, specs, strict=True)]
        with self.answering():
            outputs: list[Any] = self.run(arrays)
        if wants_tensors:
            outputs = [to_tensor(output) for output in outputs]
        if not self.artifact.out_spec:  # a file of somebody else's
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        return pytree.tree_unflatten(outputs, pytree.treespec_loads(self.artifact.out_spec))


@dataclass(frozen=True)
class Shared:
    """One value of two files.

    Attributes:
        name: Its name before quantization, in the first file.
        first: The value in the first file, as its runtime knows it.
        basis: What tells that they are one: the place among the outputs, the name, the name of the layer they end, or
            the place of that layer.
        layer: The node that computes it: in files of this package the module's path.
        op: That node's operator in the second file.
        stored: Whether the second file stores it as integers.
    """

    name: str
    first: Any
    second: Any
    basis: Basis
    layer: str
    op: str
    stored: bool


class FileValues(ABC):
    """The values a file computes."""

    @abstractmethod
    def shared(self, other: FileValues) -> list[Shared]:
        """Return the values that another file with as many outputs shares, in its order of execution.

        Raises:
            Refused: The files share nothing between inputs and outputs.
        """

    @abstractmethod
    def sources(self, values: Sequence[Any]) -> list[list[int]]:
        """Return for each of some values the places of the nearest ones that it is computed from."""

    @abstractmethod
    def reader(self, values: Sequence[Any]) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
        """Return a function from flat inputs to these values, computed operator by operator, none fused.

        Raises:
            Refused: The runtime cannot run the file that way.
        """


class Target(ABC):
    """A backend. Subclasses are registered once with ``register_target``.

    What a subclass must say is abstract or without a value here; everything else is a face it may have.

    Attributes:
        name: The word after ``--to``.
        suffix: File name ending, with its dot.
        summary: One line for ``optimize targets``.
        support: What it writes and runs; of another package, all that it is asked for, unless it names nothing.
        packages: Distributions whose versions a figure depends on.
        profiled: Whether its runtime tells the time of each kernel (``probe``).
        times_layers: Whether it tells it of any file, not of those alone that were exported to tell it.
        endings: How the names of files end that it opens as they are, in lower case.
        noun: What to call such a file.
        alone: Python that makes of a ``path`` a function ``f`` from arrays, one an input, to a list of the outputs,
            without this package; empty where files are for measuring here.
        alone_cpp: The same in C++, as templates of ``snippets.snippets``: of one input, and of the program.
        numerics: What INT8 means to the backend.
        integers_on: Where the runtime has kernels for its INT8 files, in words.
        without_bfloat16: What its bfloat16 files do on processors without such instructions, as sentences.
        packs: Whether weights of few bits are stored in no more.
        portable: Whether files run on other processors than those of the machine that made them.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]
    summary: ClassVar[str]
    support: ClassVar[Support] = Support(floats=(), free="unknown")
    packages: ClassVar[tuple[str, ...]] = ()
    profiled: ClassVar[bool] = False
    times_layers: ClassVar[bool] = False
    endings: ClassVar[tuple[str, ...]] = ()
    noun: ClassVar[str] = ""
    alone: ClassVar[str] = ""
    alone_cpp: ClassVar[tuple[str, str]] = ("", "")
    numerics: ClassVar[Numerics] = USUAL
    integers_on: ClassVar[str] = "every x86 and ARM processor"
    without_bfloat16: ClassVar[str] = ""
    packs: ClassVar[bool] = False
    portable: ClassVar[bool] = True

    @property
    def device(self) -> str:
        """Where its kernels run: ``cpu``, or ``cuda``, which works while the process waits."""
        return "cpu"

    @abstractmethod
    def available(self) -> Availability:
        """Say whether this backend can export and run here, without importing it where that can be avoided."""

    def require(self) -> None:
        """Check that files of this target run here.

        Raises:
            TargetUnavailable: They do not; the message says why, its hint what to install.
        """
        found = self.available()
        if not found.run:
            raise TargetUnavailable(f"{self.name}: {found.reason}.", hint=found.install)

    def answering(self) -> AbstractContextManager[None]:
        """Tell an error in it meanwhile as that of its package, where that is another than this one."""
        return attributed("target", self.name, type(self))

    def require_precision(self, program: Program) -> None:
        """Check that ``support`` names the precision of a program: fewer bits are INT8's form, float64 the model's own.

        Raises:
            Refused: It does not.
        """
        written, asked = self.support.precisions, program.precision
        if written and asked != "float64" and re.sub(r"int[\d.]+", "int8", asked) not in written:
            raise Refused(
                f"{self.name} files are written in {', '.join(written)}; this one is {asked}.",
                hint="Leave the precision out for this target.",
            )

    def write(self, program: Program, path: Path) -> Artifact:
        """Export a program: the way to ``export`` from outside a target.

        Targets of other packages are asked for nothing but what their ``support`` names. Those of this one refuse in
        their own words, and write some precisions that their runtime only widens.

        Raises:
            TargetUnavailable: The backend is not installed.
            Refused: The precision is not the target's, the program has something it lacks, or the target failed.
        """
        if is_foreign(type(self)):
            self.require_precision(program)
        with self.answering():
            written: object = self.export(program, path)
            if not isinstance(written, Artifact):
                raise TypeError(f"export returned a {type(written).__name__}, not an Artifact")
        return written

    def files(self, path: Path) -> tuple[Path, ...]:
        """Return the files an artifact at ``path`` consists of, ``path`` first."""
        return (path,)

    @abstractmethod
    def export(self, program: Program, path: Path) -> Artifact:
        """Lower the program and write it to ``path`` (to a temporary name first, then renamed).

        Raises:
            TargetUnavailable: The backend is not installed.
            Refused: The program uses something the backend lacks; the message names the op and the layer.
        """

    def owns(self, path: Path) -> bool:
        """Say whether a file is one that this target opens as it is."""
        return path.suffix.lower() in self.endings

    def open(self, path: Path, *, trust: bool = False) -> Artifact:
        """Describe a file that it owns, whoever made it: what it takes is read once, behind the checks of its kind.

        Args:
            path: The file.
            trust: Take whatever the file asks for, code included; without, the artifact is ``untrusted``.

        Raises:
            Refused: The file is missing, or is refused by the checks; or the target only names ``endings``.
        """
        raise Refused(
            f"{named_with_package('target', self.name, type(self))} cannot open '{path}': it names the ending "
            f"'{path.suffix}' in `endings`, and has no method `open`.",
            hint="Write `open`, or leave `endings` out: CONTRIBUTING.md, Add a target.",
        )

    def module(self, path: Path, *, trust: bool = False) -> torch.nn.Module:
        """Return the model that one of its files holds as a module that a run starts from (``frontend.ForeignGraph``).

        Raises:
            Refused: The file is refused by the checks, is quantized, or has operators that are not read.
        """
        raise NotImplementedError(f"{self.name} files are not read back")

    def label(self, path: Path, said: Mapping[str, str]) -> None:
        """Write into a finished file what became of it, by key, where its format has room; its graph stays as it is."""
        return

    def values(self, artifact: Artifact) -> FileValues | None:
        """Return the values that a file computes between its inputs and its outputs; None where nothing tells them."""
        return None

    def export_plans(self, program: Program, plans: Sequence[Quantization], folder: Path) -> list[Artifact]:
        """Write a file for each of several INT8 plans of a program, to time them.

        Raises:
            Refused: The program cannot be translated, or no layer of a plan can run in INT8.
        """
        paths = [folder / f"trial_{index}{self.suffix}" for index in range(len(plans))]
        return [self.write(replace(program, quantization=plan), path) for plan, path in zip(plans, paths, strict=True)]

    def noting_kernels(self) -> AbstractContextManager[None]:
        """Let files that are exported meanwhile tell a profiler of their kernels, where they must be asked to."""
        return nullcontext()

    def probe(self, asked: Probing) -> Probe:
        """Load an artifact so that it runs with and without its runtime's profiler; of targets that are ``profiled``.

        Raises:
            TargetUnavailable: The runtime is not installed, or cannot run the file.
        """
        raise NotImplementedError(f"{self.name} tells no times")

    def warnings(self, artifact: Artifact) -> tuple[str, ...]:
        """Return what the reader of a report must know about an artifact of this target first; mostly nothing."""
        here, name = processor.host(), f"{self.name} {artifact.precision}"
        told = [f"{name}: its {reason}."] if (reason := processor.misfit(artifact.cpu, here)) else []
        if self.without_bfloat16 and artifact.precision.endswith("bfloat16") and here.lacks_bfloat16:
            told.append(f"{name}: this processor has no instructions for bfloat16. {self.without_bfloat16}")
        return tuple(told)

    @abstractmethod
    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load an artifact of this target; ``threads`` bounds the runtime's compute threads where it can.

        Raises:
            TargetUnavailable: The runtime is not installed or cannot run here.
        """


def file_digest(*paths: Path) -> str:
    """Return the SHA-256 of a file, or of several, each behind its size in bytes, hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            if len(paths) > 1:  # else bytes could go from one file to the next
                digest.update(b"%d " % os.fstat(file.fileno()).st_size)
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
