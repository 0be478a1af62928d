"""Builds one engine, in a child process: a native abort in TensorRT's parser or builder is a refusal there.

It does not import torch, unless Torch-TensorRT builds. One code serves TensorRT 10, 11 and TensorRT-RTX: networks are
strongly typed, so precisions are those of the graph.

An engine straight from the program's operators, instead of from an ONNX model, is built by Torch-TensorRT. That is
written against the documented interface of its releases 2.8 to 2.12 (``torch_tensorrt.dynamo``); it needs a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from optimize import progress, sandbox
from optimize.errors import Refused, TargetUnavailable, first_line
from optimize.files import whole
from optimize.sandbox import ChildLimits, Died, Unforeseen
from optimize.targets.base import LayerTypes, TypedLayer
from optimize.targets.tensorrt import log, packages
from optimize.targets.tensorrt.layers import inspect, network_types, weighted_layers
from optimize.targets.tensorrt.log import build_failure, parse_failure, plain
from optimize.targets.tensorrt.options import EngineOptions, Profile
from optimize.targets.tensorrt.reading import names_of

_BUILD = "optimize.targets.tensorrt.builder:build_here"


def build_apart(order: Order) -> Built:
    """Build an engine in a child process; ``order.engine`` may be left half-written when this raises.

    Raises:
        TargetUnavailable: The library cannot be imported, is too old, or finds no driver.
        Refused: It does not accept the model, runs out of memory, or crashed on it.
    """
    arguments, limits = {"order": dataclasses.asdict(order)}, ChildLimits.until(None)
    try:
        answer = sandbox.call(
            _BUILD, arguments, about=order.title, limits=limits, confined=False, progress=progress.tell
        )
    except (Died, Unforeseen) as error:
        raise _crash(order, error) from error
    return TypeAdapter(Built).validate_python(answer.value)


def _crash(order: Order, error: Died | Unforeseen) -> Refused:
    hint = "Try another version of it, or another target."
    how = error.reason if isinstance(error, Unforeseen) else error.end
    if isinstance(error, Died) and error.code == -signal.SIGKILL:
        hint = "The system ends processes so when it runs out of memory: lower max_batch, or free memory."
    return Refused(f"{order.title} crashed while building the engine ({how}).", hint=hint)


def build(order: Order, tell: Callable[[float], None] = lambda share: None) -> Built:
    """Build an engine in this process.

    Args:
        order: What to build.
        tell: Told the share that is done, from 0 to 1.

    Raises:
        TargetUnavailable: The library cannot be imported, is too old, or finds no driver.
        Refused: It does not accept the model, or runs out of memory; the message names the operator and the layer.
    """
    module = import_library(order)
    logger = log.listen(module)
    builder = _builder(module, logger, order)
    network = builder.create_network(network_flags(module))
    parser = module.OnnxParser(network, logger)
    if not parser.parse_from_file(order.source):
        found = [parser.get_error(index) for index in range(parser.num_errors)]
        raise parse_failure(_library(order, module), found, log.errors())
    config = _config(module, builder, order, tell)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise build_failure(_library(order, module), log.errors())
    Path(order.engine).write_bytes(engine)
    _keep_timings(config, order)
    warnings = tuple(map(plain, log.warnings()))
    if order.module == "tensorrt_rtx":  # an engine of its has no layers: it makes kernels on the GPU that runs it
        types = network_types(network)
    else:
        types = inspect(module, module.Runtime(logger).deserialize_cuda_engine(engine))
    return Built(str(module.__version__), weighted_layers(network), types, warnings)


def network_flags(module: Any) -> int:
    """Return the flags that make a network strongly typed: TensorRT 10 asks for one, later versions always are."""
    flag = getattr(module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _library(order: Order, module: Any) -> str:
    return f"{order.title} {module.__version__}"


def _builder(module: Any, logger: Any, order: Order) -> Any:
    """Return a builder; without a working driver TensorRT's constructor returns nothing, which Python calls TypeError.

    Raises:
        TargetUnavailable: It cannot start.
    """
    try:
        return module.Builder(logger)
    except (TypeError, RuntimeError) as error:
        failure = build_failure(_library(order, module), log.errors() or [str(error)])
        raise TargetUnavailable(failure.what, hint=failure.hint) from error


def _config(module: Any, builder: Any, order: Order, tell: Callable[[float], None]) -> Any:
    config, options = builder.create_builder_config(), order.options
    config.progress_monitor = monitor(module, tell)
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # what the engine inspector reads
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    for option, flag in (
        (options.version_compatible, "VERSION_COMPATIBLE"),
        (options.refit, "REFIT"),
        (options.sparse_weights, "SPARSE_WEIGHTS"),
    ):
        if option:
            config.set_flag(getattr(module.BuilderFlag, flag))
    if options.hardware_compatible != "none":
        level = getattr(module.HardwareCompatibilityLevel, options.hardware_compatible.upper())
        config.hardware_compatibility_level = level
    _set_capabilities(module, config, options.compute_capabilities)
    _load_timings(config, order)
    if order.profile:
        profile = builder.create_optimization_profile()
        for name, shapes in order.profile.items():
            profile.set_shape(name, *(tuple(shape) for shape in shapes))
        config.add_optimization_profile(profile)
    return config


def _set_capabilities(module: Any, config: Any, names: tuple[str, ...]) -> None:
    """Name the GPU generations to build for; TensorRT itself builds for the GPU it runs on and is asked for none."""
    if names:
        config.num_compute_capabilities = len(names)
        for index, name in enumerate(names):
            capability = getattr(module.ComputeCapability, f"SM{name.replace('.', '')}")
            config.set_compute_capability(capability, index)


def _load_timings(config: Any, order: Order) -> None:
    """Give the builder the kernel timings of earlier builds; an empty cache is filled."""
    if order.options.timing_cache:
        file = Path(order.options.timing_cache)
        config.set_timing_cache(config.create_timing_cache(file.read_bytes() if file.exists() else b""), False)


def _keep_timings(config: Any, order: Order) -> None:
    if order.options.timing_cache:
        with whole(Path(order.options.timing_cache)) as temporary:
            temporary.write_bytes(config.get_timing_cache().serialize())


def build_here(folder: Path, tell: Callable[[str, float], None], order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order in this process, which is a child; return what was built as JSON holds it."""
    asked = TypeAdapter(Order).validate_python(order)
    is_by_torch = asked.module == "torch_tensorrt"
    return dataclasses.asdict(
        build_with_torch(asked) if is_by_torch else build(asked, lambda share: tell("build", share))
    )


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class Shares:
    """The share of a build that is done, from the phases that are open; it never falls."""

    def __init__(self) -> None:
        self._open: dict[str, _Phase] = {}
        self._highest = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Open a phase of so many steps, inside another or as the whole build."""
        self._open[name] = _Phase(parent, max(steps, 1))

    def step(self, name: str) -> float:
        """Finish a step of a phase; return the share of the build that is done.

        >>> shares = Shares()
        >>> shares.start("build", None, 2)
        >>> shares.start("clone", "build", 4)
        >>> shares.step("clone"), shares.step("build")
        (0.125, 0.5)
        """
        self._open[name].done += 1
        self._highest = min(1.0, max(self._highest, self._share(name)))
        return self._highest

    def finish(self, name: str) -> float:
        """Close a phase, whatever steps it left out; return the share of the build that is done."""
        phase = self._open.pop(name)
        if phase.parent is None:
            self._highest = 1.0
        return self._highest

    def _share(self, name: str) -> float:
        """Return where the build stands, seen from an open phase, which is a part of one step of its parent."""
        share, phase = 0.0, self._open.get(name)
        while phase is not None:
            share, phase = (phase.done + share) / phase.steps, self._open.get(phase.parent or "")
        return share


def monitor(module: Any, tell: Callable[[float], None]) -> Any:
    """Return an ``IProgressMonitor`` of ``tensorrt`` or ``tensorrt_rtx`` that tells the share done after each step."""

    class _Monitor(module.IProgressMonitor):
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self._shares = Shares()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._shares.start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            tell(self._shares.step(name))
            return True  # go on building

        def phase_finish(self, name: str) -> None:
            tell(self._shares.finish(name))

    return _Monitor()


#: Strongly typed networks with explicit Q/DQ are complete from this version on.
OLDEST = 10


@dataclass(frozen=True)
class Order:
    """What to build.

    Attributes:
        module: ``tensorrt``, ``tensorrt_rtx`` or ``torch_tensorrt``.
        title: The library's name, for messages.
        source: The ONNX model; for Torch-TensorRT an exported program.
        engine: Where the engine goes.
        profile: Smallest, typical and largest shape of each input with a free dimension.
        options: What the user asked for.
    """

    module: str
    title: str
    source: str
    engine: str
    profile: Profile
    options: EngineOptions = dataclasses.field(default_factory=EngineOptions)


@dataclass(frozen=True)
class Built:
    """What came of an order.

    Attributes:
        version: Version of the library that built.
        layers: The weighted layers of the parsed network; none where no network was parsed.
        types: All layers and their types, as the engine has them, or as the network has where no GPU can read it.
        warnings: What the parser and builder warned of.
        inputs: Names of the engine's inputs where they are not the program's.
        outputs: Those of its outputs where they are not the ONNX model's.
    """

    version: str
    layers: tuple[TypedLayer, ...]
    types: LayerTypes
    warnings: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def import_library(order: Order) -> Any:
    """Return the library's module.

    Raises:
        TargetUnavailable: It cannot be imported, or is TensorRT before version 10.
    """
    try:
        module = importlib.import_module(order.module)
    except (ImportError, OSError) as error:
        raise TargetUnavailable(f"{order.title} is installed but cannot be imported: {error}.") from error
    if order.module == "tensorrt" and int(module.__version__.partition(".")[0]) < OLDEST:
        raise TargetUnavailable(
            f"TensorRT {module.__version__} is too old: networks are strongly typed from version {OLDEST} on.",
            hint=f'pip install "tensorrt>={OLDEST}"',
        )
    return module


def build_with_torch(order: Order) -> Built:
    """Build an engine from the exported program in ``order.source``, the whole of it or nothing.

    Raises:
        TargetUnavailable: Torch-TensorRT or TensorRT cannot be imported, or there is no GPU.
        Refused: It has no converter for an operator (named in the message), or the build fails.
    """
    import torch

    library = import_library(order)
    if not packages.has_gpu():
        raise TargetUnavailable(f"{order.title} builds on a GPU and there is none.", hint="Leave library out.")
    exported = torch.export.load(order.source)
    try:
        engine = library.dynamo.convert_exported_program_to_serialized_trt_engine(
            exported, arg_inputs=_inputs(library, exported, order), **_settings(order)
        )
    except Exception as error:  # whatever the library raises is the reason
        raise _failure(f"{order.title} {library.__version__}", error) from error
    Path(order.engine).write_bytes(engine)
    tensorrt = importlib.import_module("tensorrt")
    loaded = tensorrt.Runtime(log.listen(tensorrt)).deserialize_cuda_engine(engine)
    warnings = tuple(map(plain, log.warnings()))
    inputs, outputs = (names_of(tensorrt, loaded, mode) for mode in ("INPUT", "OUTPUT"))
    return Built(str(library.__version__), (), inspect(tensorrt, loaded), warnings, inputs, outputs)


def _inputs(library: Any, exported: Any, order: Order) -> list[Any]:
    """Return the shapes and type of each input, as the library's ``Input``; re-exporting has renamed them."""
    ranges, found = iter(order.profile.values()), []
    for value in _values(exported):
        if all(isinstance(size, int) for size in value.shape):
            shapes: dict[str, Any] = {"shape": tuple(value.shape)}
        else:
            smallest, typical, largest = (tuple(shape) for shape in next(ranges))
            shapes = {"min_shape": smallest, "opt_shape": typical, "max_shape": largest}
        found.append(library.Input(**shapes, dtype=value.dtype))
    return found


def _values(exported: Any) -> list[Any]:
    """Return the tensors a program takes, with symbols for free sizes."""
    names = exported.graph_signature.user_inputs
    return [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in names]


def _settings(order: Order) -> dict[str, Any]:
    """Return its compilation settings: types of the graph are obeyed, as in a strongly typed network."""
    options = order.options
    settings: dict[str, Any] = {
        "use_explicit_typing": True,
        "immutable_weights": not options.refit,
        "version_compatible": options.version_compatible,
        "hardware_compatible": options.hardware_compatible != "none",
    }
    if options.workspace_bytes is not None:
        settings["workspace_size"] = options.workspace_bytes
    if options.sparse_weights:
        settings["sparse_weights"] = True
    if options.timing_cache:
        settings["timing_cache_path"] = options.timing_cache
    return settings


def _failure(library: str, error: Exception) -> Refused | TargetUnavailable:
    text = str(error) or type(error).__name__
    if type(error).__name__ == "UnsupportedOperatorException":
        hint = "Leave library out: the road through ONNX has more operators."
        return Refused(f"{library} has no converter: {first_line(error)}.", hint=hint)
    failure = build_failure(library, [text])
    return failure if isinstance(failure, TargetUnavailable) else Refused(failure.what, hint=failure.hint)
