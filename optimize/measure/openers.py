"""From what the user names to a subject: files of every runtime, by their targets, and torch files, by `load`.

``Opening`` says what a worker of its own must know to load it; ``open_side`` loads it in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optimize.errors import Refused, TargetUnavailable
from optimize.measure import environment
from optimize.measure.subjects import MODULE, Subject, running
from optimize.registry import find_target, target_of
from optimize.regular import require_file
from optimize.targets.base import Artifact, Runner, file_digest
from optimize.targets.packaging import describe_file, input_specs

if TYPE_CHECKING:
    from optimize.load import ModelSource
    from optimize.measure.environment import Environment
    from optimize.measure.remote import Remote
    from optimize.program import Program


@dataclass(frozen=True)
class Opening:
    """How the files of one benchmark are opened.

    Attributes:
        folder: Where exported programs are written as the files that are run; lives as long as the benchmark.
        factory: ``package.module:factory`` of the module that a state dict belongs to.
        trust: Run the code that files hold.
        device: ``cpu`` or ``cuda``: where torch modules run.
        remote: The machine that everything runs on; None for this one.
    """

    folder: Path
    factory: str | None = None
    trust: bool = False
    device: str = "cpu"
    remote: Remote | None = None

    @property
    def machine(self) -> Environment:
        """The machine that everything runs on; this one as it is now."""
        return self.remote.environment if self.remote else environment.current()

    def open_all(self, sources: Sequence[str]) -> list[Subject]:
        """Return the subjects, equal names told apart by their folders.

        Raises:
            OptimizeError: One is missing, unreadable, no model, or wants code without trust.
        """
        subjects = [self.placed(self.open(source)) for source in sources]
        names = [subject.name for subject in subjects]
        return [
            subject if names.count(subject.name) == 1 else replace(subject, name=_distinct(source, index, sources))
            for index, (subject, source) in enumerate(zip(subjects, sources, strict=True))
        ]

    def open(self, source: str) -> Subject:
        """Return one subject: by its target where a runtime takes it as it is, else by its bytes.

        Raises:
            OptimizeError: It is missing, unreadable, no model, or wants code without trust.
        """
        return open_file(Path(source), trust=self.trust) or self._open_torch(source)

    def placed(self, subject: Subject, interpreter: Path | None = None) -> Subject:
        """Return a subject that runs where everything does, with what it lacks there.

        Args:
            subject: What was opened.
            interpreter: Python of its own environment there.

        Raises:
            Refused: It is no file, and everything runs on another machine.
            TargetUnavailable: That machine does not answer.
        """
        if self.remote is None:
            return subject
        if subject.artifact.target == MODULE:
            raise Refused(
                f"'{subject.name}' is run as a Python module, which needs its code: on another machine files are run.",
                hint="Export it, such as optimize MODEL --to onnx, and give that file.",
            )
        missing = self.remote.lacks(subject.artifact.target, interpreter)
        artifact = replace(subject.artifact, missing=missing and f"on {self.remote.address.url}: {missing}")
        return replace(subject, artifact=artifact, remote=self.remote)

    def _open_torch(self, source: str) -> Subject:
        """Open a torch file or factory once, by the rules of ``optimize.load``, to learn what it is."""
        from optimize.load import ModelSource, load_trusted

        named = ModelSource.of(source, model=self.factory)
        if named.kind is not None and not self.trust and not named.is_plain:
            return self._open_untrusted(named)
        loaded, path = load_trusted(named), Path(source)
        if (program := loaded.captured()) is not None:
            return self._open_program(path, program)
        if loaded.kind == "factory":
            artifact = Artifact(MODULE, path, (), (), "", "", 0, "")
            return Subject(source, "eager module", artifact, self._loading(source))
        return self._described(path, script=loaded.kind == "torchscript", trust=True)

    def _open_untrusted(self, named: ModelSource) -> Subject:
        """Learn what an untrusted file is in a confined process; a state dict and a graph become data there."""
        from optimize.load import load_state
        from optimize.load.taking import look

        assert named.path is not None and named.kind is not None
        path, taken = named.path, look(named.path, named.kind)
        if taken.program is not None:
            return self._open_program(path, taken.program)
        if taken.state is None:
            return self._described(path, script=taken.noun == "TorchScript", trust=False)
        load_state(named, taken.state)  # refuses here what does not fit, not in every worker
        plain = self.folder / f"{file_digest(path)[:12]}.safetensors"
        _write_plain(taken.state, plain)
        return replace(self._described(path, script=False, trust=True), loading=self._loading(str(plain), self.factory))

    def _described(self, path: Path, *, script: bool, trust: bool) -> Subject:
        """Return a torch file as a subject: TorchScript on the CPU by its target, everything else as a module."""
        kind = "TorchScript" if script else "eager module"
        if script and self.device == "cpu":
            return _named(path, kind, find_target("torchscript").open(path, trust=trust))
        loading = self._loading(str(path.absolute()), self.factory)
        return Subject(path.name, kind, describe_file(MODULE, path, trust=trust), loading)

    def _loading(self, source: str, factory: str | None = None) -> dict[str, Any]:
        return {"source": source, "factory": factory, "device": self.device}

    def _open_program(self, path: Path, program: Program) -> Subject:
        artifact = self.write_program(program, path.stem, path)
        return Subject(path.name, "exported program, operator by operator", artifact)

    def write_program(self, program: Program, stem: str, source: Path) -> Artifact:
        """Write a program to be run operator by operator; its size and hash are those of the file it came from.

        Raises:
            TargetUnavailable: It is to run on a GPU, and there is none.
        """
        artifact = find_target("eager" if self.device == "cpu" else "cuda").export(
            program, self.folder / f"{stem}.eager.pt2"
        )
        if not source.is_file():
            return artifact
        return replace(artifact, size_bytes=source.stat().st_size, sha256=file_digest(source))


@dataclass(frozen=True)
class Side:
    """A subject that is loaded in this process."""

    subject: Subject
    runner: Runner

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the flat outputs for arrays of the agreed inputs; floats are cast to what the file says it takes.

        Raises:
            Refused: The runtime reports an error.
        """
        return self.guarded(self.runner.run, arrays)

    def guarded(
        self, run: Callable[[Sequence[np.ndarray]], list[np.ndarray]], arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Run something of the file's as ``run`` does."""
        with running(self.subject.artifact.path), self.runner.answering():
            told = self.runner.artifact.inputs or self.subject.outside
            return run(self.subject.arranged(arrays) if told else arrays)


def open_file(path: Path, *, trust: bool) -> Subject | None:
    """Return a file that a runtime takes as it is; None for everything else.

    Raises:
        OptimizeError: It is missing, or refused by the checks of its kind.
    """
    target = target_of(path)
    if target is None:
        return None
    require_file(path)
    with target.answering():
        return _named(path, target.noun, target.open(path, trust=trust))


def _named(path: Path, noun: str, artifact: Artifact) -> Subject:
    """Return a file as a subject, which says what its integers were made for."""
    return Subject(path.name, f"{noun}, INT8 (--cpu {artifact.cpu})" if artifact.cpu else noun, artifact)


def open_side(source: str, *, trust: bool = False, factory: str | None = None) -> Side:
    """Open and load a file: by its target where a runtime takes it as it is, else by the rules of ``optimize.load``.

    Without trust, this is done in a confined process: what is opened here is run here.

    Raises:
        Refused: It is missing, unreadable, no model, or wants code without trust.
        TargetUnavailable: Its runtime is not installed, or has no kernel for an operator.
    """
    from optimize.load import ModelSource, load_confined, load_trusted
    from optimize.measure.modules import ModuleRunner

    path = Path(source)
    found = open_file(path, trust=trust)
    if found is not None:
        if found.missing:
            raise TargetUnavailable(f"'{source}' cannot run on this machine: {found.missing}.")
        return Side(found, found.artifact.load())
    named = ModelSource.of(path, model=factory)
    loaded = load_trusted(named) if trust else load_confined(named)
    call: Callable[..., Any] = loaded.module
    artifact = Artifact(MODULE, path, (), (), "", named.sha256 or "", 0, "")
    if (program := loaded.captured()) is not None:
        artifact, call = replace(artifact, inputs=input_specs(program)), lambda *tensors: program.run(tensors)
    else:
        loaded.module.eval()
    noun = loaded.kind.replace("_", " ").replace("torchscript", "TorchScript")
    return Side(Subject(path.name, noun, artifact), ModuleRunner(artifact, call, "cpu"))


def _write_plain(state: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(state), path)


def _distinct(source: str, index: int, sources: Sequence[str]) -> str:
    """Return a longer name: with its folder, and its place where one file is given twice."""
    name = str(Path(*Path(source).parts[-2:]))
    return name if sources.count(source) == 1 else f"{name} #{sources[: index + 1].count(source)}"
