"""From what the user names to something a worker can load: files of every runtime, and eager modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimize.errors import OptimizeError, Refused
from optimize.measure.worker import MODULE
from optimize.registry import find_target
from optimize.regular import find, require_file
from optimize.targets.base import Artifact, TensorSpec, file_digest

if TYPE_CHECKING:
    from optimize.load import ModelSource
    from optimize.program import Program

_ENGINES = {".engine", ".plan", ".trt"}
#: Tokens that an integer input may name where no file gives a limit.
_TOKENS = 2


@dataclass(frozen=True)
class Subject:
    """Something to be timed.

    Attributes:
        name: File name, or the factory; unique in one benchmark.
        kind: What it is, in words.
        artifact: The file and what it takes (nothing where it does not say).
        loading: What a worker must know to load it beside the artifact.
        missing: Why it cannot run here, empty when it can.
        tokens: How many tokens its integer inputs may name, by input, where the file says so.
        feed: For each input its place among those all agree on, and how many tokens it may name.
    """

    name: str
    kind: str
    artifact: Artifact
    loading: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    feed: tuple[tuple[int, int], ...] = ()

    @property
    def fixed_batch(self) -> int | None:
        """The only batch it takes; None where the batch is free."""
        sizes = [spec.shape[0] for spec in self.artifact.inputs if spec.shape]
        return next((size for size in sizes if isinstance(size, int)), None)


@dataclass(frozen=True)
class Opening:
    """How the files of one benchmark are opened.

    Attributes:
        folder: Where exported programs are written as the files that are run; lives as long as the benchmark.
        factory: ``package.module:factory`` of the module that a state dict belongs to.
        trust: Run the code that files hold.
        device: ``cpu`` or ``cuda``: where torch modules run.
    """

    folder: Path
    factory: str | None = None
    trust: bool = False
    device: str = "cpu"

    def open_all(self, sources: Sequence[str]) -> list[Subject]:
        """Return the subjects, equal names told apart by their folders.

        Raises:
            OptimizeError: One is missing, unreadable, no model, or wants code without trust.
        """
        subjects = [self.open(source) for source in sources]
        names = [subject.name for subject in subjects]
        return [
            subject if names.count(subject.name) == 1 else replace(subject, name=_distinct(source, index, sources))
            for index, (subject, source) in enumerate(zip(subjects, sources, strict=True))
        ]

    def open(self, source: str) -> Subject:
        """Return one subject: by its ending where a runtime has its own, else by its bytes.

        Raises:
            OptimizeError: It is missing, unreadable, no model, or wants code without trust.
        """
        path = Path(source)
        suffix = path.suffix.lower()
        if suffix in {".onnx", ".xml", *_ENGINES}:
            require_file(path)
            if suffix == ".onnx":
                found = _open_onnx(path, self.trust)
            else:
                found = _open_openvino(path, self.trust) if suffix == ".xml" else _open_engine(path)
            return found if self.trust else _untrusted(found)
        if find(path) is not None and path.is_file() and _is_aotinductor(path):
            return self._open_package(path)
        return self._open_torch(source)

    def _open_package(self, path: Path) -> Subject:
        if not self.trust:
            raise Refused(
                f"'{path}' is native code, compiled ahead of time for one machine.",
                hint="Give --trust if you made it yourself.",
            )
        return _described("pt2", path, "AOTInductor package", (), [path])

    def _open_torch(self, source: str) -> Subject:
        """Open a torch file or factory once, by the rules of ``optimize.load``, to learn what it is."""
        from optimize.load import ModelSource, load_trusted

        named = ModelSource.of(source, model=self.factory)
        if named.kind is not None and not self.trust and not named.is_plain:
            return self._open_untrusted(named)
        loaded, path = load_trusted(named), Path(source)
        loading = {"factory": self.factory, "device": self.device}
        if (program := loaded.captured()) is not None:
            return self._open_program(path, program)
        if loaded.kind == "torchscript" and self.device == "cpu":
            return _described("torchscript", path, "TorchScript", (), [path])
        if loaded.kind == "factory":
            artifact = Artifact(MODULE, path, (), (), "", "", 0, "")
            return Subject(source, "eager module", artifact, {**loading, "source": source, "factory": None})
        kind = "TorchScript" if loaded.kind == "torchscript" else "eager module"
        return replace(_described(MODULE, path, kind, (), [path]), loading={**loading, "source": str(path.resolve())})

    def _open_untrusted(self, named: ModelSource) -> Subject:
        """Learn what an untrusted file is in a confined process; a state dict and a graph become data there."""
        from optimize.load import load_state
        from optimize.load.taking import look

        assert named.path is not None and named.kind is not None
        path, taken = named.path, look(named.path, named.kind)
        if taken.program is not None:
            return self._open_program(path, taken.program)
        loading: dict[str, Any] = {"factory": None, "device": self.device, "source": str(path.resolve())}
        if taken.state is None:
            on_cpu = taken.noun == "TorchScript" and self.device == "cpu"
            kind = "TorchScript" if taken.noun == "TorchScript" else "eager module"
            found = _untrusted(_described("torchscript" if on_cpu else MODULE, path, kind, (), [path]))
            return found if on_cpu else replace(found, loading=loading)
        load_state(named, taken.state)  # refuses here what does not fit, not in every worker
        plain = self.folder / f"{file_digest(path)[:12]}.safetensors"
        _write_plain(taken.state, plain)
        found = _described(MODULE, path, "eager module", (), [path])
        return replace(found, loading={**loading, "source": str(plain), "factory": self.factory})

    def _open_program(self, path: Path, program: Program) -> Subject:
        artifact = find_target("eager").export(program, self.folder / f"{path.stem}.eager.pt2")
        whole = replace(artifact, size_bytes=path.stat().st_size, sha256=file_digest(path))
        return Subject(path.name, "exported program, operator by operator", whole)


def _write_plain(state: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(state), path)


def _untrusted(subject: Subject) -> Subject:
    """Return a subject whose file is run in a confined process alone."""
    return replace(subject, artifact=replace(subject.artifact, untrusted=True))


def agreed_inputs(subjects: Sequence[Subject], input_shape: str | None) -> list[Subject]:
    """Return the subjects that can run, what they take filled in from the others or from ``--input-shape``.

    Raises:
        Refused: They do not take the same inputs.
        UsageError: Nothing says what they take, or a size is left free.
    """
    from optimize.measure.feed import agreed_specs

    known = [_free_batch(subject.artifact.inputs) for subject in subjects if subject.artifact.inputs]
    specs = agreed_specs([_ordered(entry, known[0]) for entry in known], input_shape)
    limits = [_tokens(subjects, index, spec) for index, spec in enumerate(specs)]
    return [subject if subject.missing else _completed(subject, specs, limits) for subject in subjects]


def _tokens(subjects: Sequence[Subject], index: int, spec: TensorSpec) -> int:
    """Return how many tokens an input may name: what the files say, by its name or its place; else two."""
    found = [limit for subject in subjects if (limit := _said(subject, index, spec.name))]
    return min(found, default=_TOKENS)


def _said(subject: Subject, index: int, name: str) -> int | None:
    names = [spec.name for spec in subject.artifact.inputs]
    own = name if name in names else names[index] if index < len(names) else ""
    return subject.tokens.get(own)


def _completed(subject: Subject, specs: Sequence[TensorSpec], limits: Sequence[int]) -> Subject:
    """Return a subject with the sizes that all agree on; its inputs are found by name, else in order."""
    own, names = subject.artifact.inputs or tuple(specs), [spec.name for spec in specs]
    by_name = {spec.name for spec in own} == set(names)
    places = [names.index(spec.name) if by_name else index for index, spec in enumerate(own)]
    inputs = tuple(
        replace(spec, shape=(spec.shape[0], *specs[place].shape[1:])) for spec, place in zip(own, places, strict=True)
    )
    feed = tuple((place, limits[place]) for place in places)
    return replace(subject, artifact=replace(subject.artifact, inputs=inputs), feed=feed)


def _ordered(specs: tuple[TensorSpec, ...], first: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return inputs in the first file's order where they have its names."""
    by_name = {spec.name: spec for spec in specs}
    return tuple(by_name[spec.name] for spec in first) if set(by_name) == {spec.name for spec in first} else specs


def _free_batch(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return inputs whose batch is free: which batches a file takes is asked per scenario."""
    return tuple(replace(spec, shape=("batch", *spec.shape[1:])) if spec.shape else spec for spec in specs)


def _open_onnx(path: Path, trust: bool) -> Subject:
    from optimize.measure.feed import FLOATS
    from optimize.targets.onnx.reading import files_of
    from optimize.targets.onnx.values import read_values, rows_of_table

    model, files = files_of(path, trust=trust)
    held = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_onnx_spec(entry, path) for entry in model.graph.input if entry.name not in held)
    found = _described("onnx", path, "ONNX", inputs, files)
    names = [spec.name for spec in inputs if spec.dtype not in FLOATS]
    values = read_values(path, trust=trust) if names else None
    limits = {name: rows_of_table(values, name) for name in names} if values else {}
    return replace(found, tokens={name: limit for name, limit in limits.items() if limit})


def _onnx_spec(entry: Any, path: Path) -> TensorSpec:
    from onnx.helper import tensor_dtype_to_np_dtype

    kind = entry.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim]
    try:
        dtype = tensor_dtype_to_np_dtype(kind.elem_type)
    except (KeyError, ValueError) as error:
        raise Refused(f"'{path}' takes '{entry.name}', which is no tensor of numbers.") from error
    return TensorSpec(entry.name, tuple(sizes), dtype.name)


def _open_openvino(path: Path, trust: bool) -> Subject:
    from optimize.targets.openvino.reading import check_ir, inputs_of

    check_ir(path, trust=trust)
    files = find_target("openvino").files(path)
    try:
        inputs = inputs_of(path, trust=trust)
    except OptimizeError as error:
        return _unavailable("openvino", path, "OpenVINO", files, error.what)
    return _described("openvino", path, "OpenVINO", inputs, files)


def _open_engine(path: Path) -> Subject:
    """Open a TensorRT engine: what it takes is read from the engine, which needs a GPU."""
    from optimize.bench.engines import read_specs
    from optimize.targets.tensorrt import packages

    found = packages.availability()
    if not found.run:
        return _unavailable("tensorrt", path, "TensorRT", [path], found.reason)
    try:
        versions, inputs, outputs = read_specs(path)
    except OptimizeError as error:
        return _unavailable("tensorrt", path, "TensorRT", [path], error.what)
    subject = _described("tensorrt", path, "TensorRT", inputs, [path])
    return replace(subject, artifact=replace(subject.artifact, outputs=outputs, versions=versions))


def _described(
    target: str, path: Path, kind: str, inputs: Sequence[TensorSpec], files: Sequence[Path], missing: str = ""
) -> Subject:
    there = [file for file in files if file.is_file()]
    size = sum(file.stat().st_size for file in there)
    artifact = Artifact(target, path, tuple(inputs), (), "", file_digest(*there), size, "")
    return Subject(path.name, kind, artifact, missing=missing)


def _unavailable(target: str, path: Path, kind: str, files: Sequence[Path], reason: str) -> Subject:
    return _described(target, path, kind, (), files, missing=reason.rstrip("."))


def _is_aotinductor(path: Path) -> bool:
    import zipfile

    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("aotinductor/" in name for name in archive.namelist())


def _distinct(source: str, index: int, sources: Sequence[str]) -> str:
    """Return a longer name: with its folder, and its place where one file is given twice."""
    name = str(Path(*Path(source).parts[-2:]))
    return name if sources.count(source) == 1 else f"{name} #{sources[: index + 1].count(source)}"
