"""Compile and run an IR file with OpenVINO on CPU (this file does not need torch)."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from optimize.errors import Refused, TargetUnavailable
from optimize.targets.arrays import element_type
from optimize.targets.base import Artifact, Runner

INSTALL = "pip install openvino"
DEVICE = "CPU"
#: Where the file says what its float operators are to be computed in.
_PRECISION = ["optimize", "inference_precision"]
#: Where it says which processors its integers were made for.
_MADE_FOR = ["optimize", "cpu"]


class OpenVINORunner(Runner):
    """A file compiled for this CPU, with one inference request a calling thread.

    Attributes:
        compiled: OpenVINO's compiled model.
    """

    def __init__(self, artifact: Artifact, *, threads: int | None = None) -> None:
        """Compile the file.

        Args:
            artifact: An artifact of the target ``openvino``.
            threads: Threads of the one stream that runs; None leaves it to OpenVINO.

        Raises:
            TargetUnavailable: OpenVINO is not installed.
            Refused: The ``.bin`` is not beside the ``.xml``, or OpenVINO cannot compile the file here.
        """
        super().__init__(artifact)
        weights = artifact.path.with_suffix(".bin")
        if not weights.is_file():
            raise Refused(
                f"'{weights}' is missing: it holds the weights of '{artifact.path.name}'.", hint="Keep both together."
            )
        self.compiled = compile_file(artifact.path, weights, threads=threads, settings=artifact.settings)
        # NumPy has no bfloat16: OpenVINO calls the same two bytes float16.
        ports = enumerate(self.compiled.outputs)
        self._bfloat16 = [place for place, port in ports if port.element_type.get_type_name() == "bf16"]
        self._own = threading.local()
        self._own.request = self.compiled.create_infer_request()

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays, read where they lie; return flat arrays of their own."""
        if not hasattr(self._own, "request"):
            self._own.request = self.compiled.create_infer_request()
        found = list(self._own.request.infer(list(inputs), share_inputs=True).values())
        for place in self._bfloat16:
            found[place] = found[place].view(element_type("bfloat16"))
        return found


def import_runtime() -> Any:
    """Return the openvino module.

    Raises:
        TargetUnavailable: It is not installed.
    """
    try:
        import openvino
    except ImportError as error:
        raise TargetUnavailable("OpenVINO is not installed.", hint=INSTALL) from error
    return openvino


@functools.cache
def core() -> Any:
    """Return the process's one ``Core``, which is never given back.

    The CPU plug-in gives the thread that loads it another stack for signals, and takes the memory away with the last
    ``Core``, in whichever thread that ends. A signal that Python handles, such as Ctrl-C or the end of a ``DataLoader``
    worker, then has no stack to arrive on, and the process ends by SIGSEGV.

    Raises:
        TargetUnavailable: OpenVINO is not installed.
    """
    return import_runtime().Core()


def add_info(path: Path, said: Mapping[str, str]) -> None:
    """Write into the description of a graph that this package has just made what became of it, by key."""
    tree = ElementTree.parse(path)  # noqa: S314 - our own file
    info = tree.getroot().find("rt_info")
    assert info is not None  # ``label`` writes some
    found = info.find(_MADE_FOR[0])
    section = ElementTree.SubElement(info, _MADE_FOR[0]) if found is None else found
    for key, text in said.items():
        ElementTree.SubElement(section, key, value=text)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def label(model: Any, precision: str, cpu: str = "") -> frozenset[str]:
    """Write into a model what its float operators are to be computed in, and names that are the same in every process.

    OpenVINO numbers nodes without a name through the whole process. Here they are numbered in execution order, and
    named after the node they belong to: the nearest one with a name that reads them.

    Args:
        model: A model just converted.
        precision: ``f32`` or ``bf16``.
        cpu: The processors its integers were made for, where it has integers.

    Returns:
        The names of its nodes.
    """
    model.set_rt_info(precision, _PRECISION)
    if cpu:
        model.set_rt_info(cpu, _MADE_FOR)
    nodes = model.get_ordered_ops()
    owners: dict[str, str] = {}
    for index, node in reversed(list(enumerate(nodes))):
        name, kind = node.get_friendly_name(), node.get_type_name()
        if re.fullmatch(rf"{kind}_\d+", name):
            readers = [entry.get_node().get_name() for port in node.outputs() for entry in port.get_target_inputs()]
            name = min((owners[reader] for reader in readers), default="")
            node.set_friendly_name(f"{name}/{kind}_{index}")
        owners[node.get_name()] = name
    return frozenset(node.get_friendly_name() for node in nodes)


def usable_precision(core: Any, asked: str) -> str:
    """Return what float operators can be computed in here: bfloat16 needs a CPU that multiplies it.

    Without such instructions OpenVINO would widen every operand on its way, and be slower than in float32.

    Args:
        core: OpenVINO's core.
        asked: ``f32`` or ``bf16``.
    """
    return asked if asked != "bf16" or "BF16" in core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES") else "f32"


def compile_file(
    description: Path,
    weights: Path,
    *,
    threads: int | None = None,
    counters: bool = False,
    settings: Mapping[str, str | bool] | None = None,
) -> Any:
    """Return the compiled model of an IR file, in the precision the file carries where this CPU has it.

    Args:
        description: The ``.xml``.
        weights: The ``.bin``.
        threads: Threads of all streams; None leaves it to OpenVINO.
        counters: Count the time of every kernel, for ``profiling_info``.
        settings: ``hint`` and ``cache`` of the target's options; one stream for latency and no cache by default.

    Raises:
        Refused: OpenVINO cannot compile it on this CPU.
    """
    with refusing(f"compile '{description.name}'"):
        model = core().read_model(description, weights)
        asked = settings or {}
        options: dict[str, Any] = {"ENABLE_CPU_PINNING": False}  # bound to a core that others use, a thread waits
        if asked.get("hint") == "throughput":
            options["PERFORMANCE_HINT"] = "THROUGHPUT"
        else:
            options |= {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        if asked.get("cache"):
            options["CACHE_DIR"] = str(asked["cache"])
        if model.has_rt_info(_PRECISION):  # a file of another writer leaves the choice to the plug-in
            precision = usable_precision(core(), model.get_rt_info(_PRECISION).astype(str))
            options["INFERENCE_PRECISION_HINT"] = precision
        if counters:
            options["PERF_COUNT"] = True
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = threads
        return core().compile_model(model, DEVICE, options)


@contextmanager
def refusing(task: str) -> Iterator[None]:
    """Turn what OpenVINO raises into a refusal that gives its reason.

    Raises:
        Refused: OpenVINO could not do the task.
    """
    try:
        yield
    except Exception as error:  # its failures have no base class of their own
        raise Refused(f"OpenVINO cannot {task}: {_reason(str(error))}.", hint="Choose another target.") from error


def _reason(text: str) -> str:
    """Return the line of an OpenVINO error that says why: the last one that is not a place in its source.

    >>> _reason("Check 'false' failed at src/a.cpp:1:\\nNot fully converted.\\n-- No rule for operations: Det\\n\\n")
    'No rule for operations: Det'
    """
    lines = [line.strip(" -.:!") for line in text.splitlines() if not re.search(r"\.[ch]pp:\d+", line)]
    return next((line for line in reversed(lines) if line), "it gives no reason")
