"""OpenVINO: an IR file and its weights for CPUs, in float32, bfloat16, static INT8, INT8 mixed with bfloat16, and with
weights alone in integers.

A file has one float type. ``--mixed bfloat16`` is a hint in it, used where the CPU multiplies bfloat16, and what ran is
read from the runtime model: all that is float computes in it then, 1.2 times as fast for a decibel. Graphs cast to 16
bits are widened first, with their weights kept small, so that constants are not rounded twice. Q/DQ stand where
TensorRT's do, with unsigned activations: on the inputs of layers and on shortcuts. A mean over the image reads bytes,
HardSigmoid is a clip, and attention is scaled behind its product: each removes a float pass between integer kernels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optimize.errors import OptimizeError, Refused, UsageError, VerificationFailed, nearest
from optimize.files import whole
from optimize.registry import register_target
from optimize.targets.arrays import to_array, to_tensor
from optimize.targets.base import Artifact, Availability, Coverage, Probing, Runner, Support, Target
from optimize.targets.onnx_graph.policy import OPENVINO
from optimize.targets.openvino.runner import INSTALL
from optimize.targets.packaging import versions_of

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

    from optimize.program import Program
    from optimize.targets.openvino.coverage import ExecutedNode
    from optimize.targets.probe import Probe

_BFLOAT16 = "bfloat16 needs AVX512-BF16 or AMX and is float32 elsewhere."
_ROUNDED = (
    "What layers with integer weights read is rounded to 8 bits at run time, 32 numbers a scale; compile the file with "
    "DYNAMIC_QUANTIZATION_GROUP_SIZE=0 for products of floats, which take two to three times as long."
)
_COUNTED = "{} layers of signs count bits: a weight of theirs is stored in one, and those of other layers in 8."
_SIGNS = "{} layers of signs are computed in INT8: OpenVINO {}."
_FREE = "counts bits where all sizes are fixed (openvino.batch=1)"
#: How far what bits give may be from what INT8 gives, of the largest value, by what floats are computed in.
_LAST_BITS = {"f32": 1e-5, "bf16": 1e-2}
_NARROW = (
    "OpenVINO's CPU plug-in computes 64-bit numbers in 32 bits, and powers and sums along an axis in float32: whole "
    "numbers beyond 2^31, and such results beyond 2^24, are not kept."
)


@register_target
@dataclass(frozen=True)
class OpenVINO(Target):
    """Writes OpenVINO's intermediate representation, ``.xml`` and ``.bin``, and runs it with OpenVINO on CPU.

    The program goes through ONNX; static INT8 is placed where OpenVINO's own compiler moves and fuses it
    (``policy.OPENVINO``). The file carries the precision its float operators are to run in, because the CPU plug-in
    otherwise chooses bfloat16 by itself: bfloat16 for a program cast to it and for INT8 mixed with it, where the CPU
    multiplies bfloat16 (AVX512-BF16, AMX), else float32. The file is compiled once before it is kept, so that the
    kernels and precisions in the report are read from the graph that OpenVINO executes on this machine.

    Attributes:
        hint: What the runner is compiled for: ``latency`` is one stream of requests, ``throughput`` as many as OpenVINO
            finds useful, one request a calling thread.
        cache: Folder where OpenVINO keeps what it compiled, for the next load; empty keeps nothing.
        batch: 1 lets the file take one sample a call, 0 any number. Layers of signs count bits where sizes are fixed.
    """

    name = "openvino"
    suffix = ".xml"
    summary = "OpenVINO IR (.xml, with its weights in .bin beside it), run with OpenVINO on CPU"
    support = Support(("float32", "bfloat16"), ("static", "weights"), ("bfloat16",), remark=_BFLOAT16)
    packages = ("openvino",)
    profiled = times_layers = True
    endings = (".xml",)
    noun = "OpenVINO"
    alone = """
import openvino

model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

def f(*arrays):
    found = model(list(arrays))
    return [found[port] for port in model.outputs]
"""
    alone_cpp = (
        """\
  std::vector<$type> data_$at($count);$free
  request.set_input_tensor($at, ov::Tensor(ov::element::from<$type>(), {$sizes}, data_$at.data()));""",
        """
#include <openvino/openvino.hpp>

#include <cstdint>
#include <iostream>
#include <vector>

int main() {
  ov::Core core;
  auto model = core.compile_model($path, "CPU", ov::hint::inference_precision(ov::element::f32));
  auto request = model.create_infer_request();
$feeds
  request.infer();
  for (size_t at = 0; at < model.outputs().size(); ++at) {
    std::cout << model.output(at).get_any_name() << " " << request.get_output_tensor(at).get_shape() << "\\n";
  }
}
""",
    )
    numerics = OPENVINO.numerics
    without_bfloat16 = _BFLOAT16

    hint: Literal["latency", "throughput"] = "latency"
    cache: str = ""
    batch: int = 0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UsageError: There is no such hint or batch.
        """
        hints = ("latency", "throughput")
        if self.hint not in hints:
            raise UsageError(f"openvino: there is no hint '{self.hint}'.", hint=nearest(self.hint, hints))
        if self.batch not in (0, 1):
            hint = f"--static-batch {self.batch} fixes it for all files." if self.batch > 0 else ""
            raise UsageError(f"openvino.batch={self.batch}: a file takes one sample (1) or any number (0).", hint=hint)

    def available(self) -> Availability:
        """Say whether OpenVINO is installed; it both writes and runs the file."""
        versions = versions_of("openvino", "torch", "onnx")
        if "openvino" not in versions:
            return Availability(export=False, run=False, reason="OpenVINO is not installed", install=INSTALL)
        return Availability(export=True, run=True, version=versions)

    @property
    def _settings(self) -> dict[str, str | bool]:
        """What a runner of its files is asked."""
        return {"hint": self.hint, "cache": self.cache}

    def files(self, path: Path) -> tuple[Path, ...]:
        """Return the description of the graph and, beside it, its weights."""
        return path, path.with_suffix(".bin")

    def export(self, program: Program, path: Path) -> Artifact:
        """Write the program as IR, ``path`` and the ``.bin`` beside it, with a free batch unless ``batch`` says one.

        Raises:
            TargetUnavailable: OpenVINO is not installed.
            UsageError: The path has another ending, which OpenVINO does not write.
            Refused: ONNX or OpenVINO lacks an operator of the program, or no layer can run in INT8.
        """
        if path.suffix != self.suffix:
            hint = f"Name it '{path.with_suffix(self.suffix)}'."
            raise UsageError(f"OpenVINO writes files that end with {self.suffix}, not '{path}'.", hint=hint)
        from optimize.targets.openvino.coverage import notes, read_coverage
        from optimize.targets.openvino.runner import core, import_runtime, usable_precision
        from optimize.targets.packaging import describe, made_for

        runtime = import_runtime()
        program = program.fixed(self.batch) if self.batch and program.batch is not None else program
        model, placed, origins = _lower(program)
        asked = _float_precision(program)
        arrays = [to_array(tensor) for tensor in program.inputs]
        kernels, counted, signs = _write(runtime, model, asked, self.files(path), made_for(self, program), arrays)
        plan = program.quantization
        alone = plan is not None and plan.mode == "weights"
        wide = any(tensor.dtype.itemsize >= 4 and not tensor.is_floating_point() for tensor in program.inputs)
        told = notes(kernels, asked, usable_precision(core(), asked))
        return describe(
            self,
            program,
            path,
            coverage=None if placed is None else read_coverage(kernels, placed, _output_layers(model), weights=alone),
            notes=(*told, *signs, *_apart(program, asked, wide=wide)),
            stored=_COUNTED.format(counted) if counted else "",
            settings=self._settings,
            origins=origins,
        )

    def open(self, path: Path, *, trust: bool = False) -> Artifact:
        """Describe a graph and its weights once they are checked.

        Raises:
            Refused: They are no IR, or ask for too much.
        """
        from optimize.targets.openvino.reading import check_ir, ends_of
        from optimize.targets.packaging import describe_file, of_chance

        body = check_ir(path, trust=trust)
        files, precision = self.files(path), body.precision
        found = describe_file(self.name, path, files, trust=trust, precision=precision, said=body.said)
        found = replace(found, notes=of_chance(body.of_chance), settings=self._settings)
        try:
            inputs, outputs = ends_of(path, trust=trust)
            return replace(found, inputs=inputs, outputs=outputs)
        except OptimizeError as error:
            return replace(found, missing=error.what.rstrip("."))

    def label(self, path: Path, said: Mapping[str, str]) -> None:
        """Write what became of a file into the ``rt_info`` of its description."""
        from optimize.targets.openvino.runner import add_info

        add_info(path, said)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Compile the file for this CPU, in the precision it carries.

        Raises:
            TargetUnavailable: OpenVINO is not installed.
            Refused: The ``.bin`` is not beside the ``.xml``, or OpenVINO cannot compile the file here.
        """
        from optimize.targets.openvino.runner import OpenVINORunner

        return OpenVINORunner(artifact, threads=threads)

    def probe(self, asked: Probing) -> Probe:
        """Compile the file twice, once with counters.

        Raises:
            TargetUnavailable: OpenVINO is not installed.
            Refused: OpenVINO cannot compile the file here.
        """
        from optimize.targets.openvino.probe import OpenVinoProbe

        return OpenVinoProbe(asked)


def _lower(program: Program) -> tuple[ir.Model, Coverage | None, dict[str, str]]:
    """Return the program as ONNX, what was placed in INT8 in it, and which calls its nodes and values are.

    Raises:
        Refused: It has a plan that OpenVINO has no form for, or no layer can run in INT8.
    """
    from optimize.precision.host import spare_cheaply
    from optimize.targets.onnx_graph.export import origins_in, to_onnx
    from optimize.targets.onnx_graph.quantize import quantize_onnx
    from optimize.targets.onnx_graph.weight_only import quantize_weights
    from optimize.targets.openvino.attention import multiply_integers, separate_projections
    from optimize.targets.openvino.rewrites import (
        join_ends,
        keep_axes,
        keep_whole_numbers,
        reduce_integers,
        scale_products,
        settle_tables,
        spell_hard_sigmoids,
        store_means,
        widen,
        write_biases,
        write_spectra,
        write_sums,
    )
    from optimize.targets.packaging import planned_floats, require_layers

    plan = program.quantization
    if plan is not None and plan.mode == "dynamic":
        raise Refused("OpenVINO has no dynamic INT8 that a file can ask for.", hint="Use --int8=static, or --bf16.")
    model, value_names = to_onnx(program)
    origins = origins_in(model, value_names)
    widen(model)
    spell_hard_sigmoids(model)
    scale_products(model)
    write_spectra(model)
    join_ends(model)
    keep_whole_numbers(model)
    if plan is None:
        return model, None, origins
    if plan.mode == "weights":
        placed, _ = quantize_weights(model, program)
        require_layers(placed, "OpenVINO")
        settle_tables(model)
        return model, replace(placed, left_float=(*placed.left_float, *planned_floats(program))), origins
    plan = plan if plan.half is not None else spare_cheaply(program, plan)
    parts = separate_projections(model, plan.layers)
    placed = _whole(quantize_onnx(model, value_names, plan, OPENVINO), parts)
    require_layers(placed, "OpenVINO")
    calibrated = {value_names[node]: known for node, known in plan.ranges.items() if node in value_names}
    store_means(model, calibrated, OPENVINO.numerics.activation)
    multiply_integers(model, calibrated)
    reduce_integers(model)
    keep_axes(model)
    write_sums(model)
    write_biases(model)
    tables, _ = quantize_weights(model, program, tables=True)
    settle_tables(model)
    return model, replace(placed, quantized=(*tables.quantized, *placed.quantized)), origins


def _whole(placed: Coverage, parts: frozenset[str]) -> Coverage:
    """Return what was placed by layers of the program: the parts of one count once."""
    left = tuple(layer for layer in placed.left_float if layer.name not in parts)
    return Coverage(tuple(name for name in placed.quantized if name not in parts), left)


def _float_precision(program: Program) -> str:
    """Return what OpenVINO shall compute float operators in: the program's precision, in its own word.

    Float16 is widened: x86 has no float16 kernels there, and asking for them brings bfloat16. A file has one float
    type: where linear layers are spared INT8 that this CPU multiplies faster in bfloat16, all of them are in that,
    unless more layers are in float because the answers must be nearer still.
    """
    import torch

    from optimize.precision.host import half_layers

    plan = program.quantization
    if plan is not None and plan.half is not None:
        return "bf16" if plan.half.dtype == "bfloat16" else "f32"
    if plan is not None and plan.spared and plan.left_float.keys() <= plan.spared and half_layers(program, plan):
        return "bf16"
    weights = (*program.graph_module.parameters(), *program.graph_module.buffers())
    return "bf16" if any(weight.dtype is torch.bfloat16 for weight in weights) else "f32"


def _apart(program: Program, asked: str, *, wide: bool) -> list[str]:
    """Return what the file does otherwise than the program says."""
    import torch

    from optimize import graph, ops

    found = [_NARROW] if wide else []
    plan = program.quantization
    if plan is not None and plan.mode == "weights":
        found.append(_ROUNDED)
    half = plan.half if plan is not None else None
    if half is None and plan is not None and asked == "bf16":
        found.append("Layers spared INT8 run in bfloat16, faster here than float32, and with them all that is float.")
    if half is not None:
        kept = [node for node in program.graph.nodes if node.op == "call_function" and node.name in half.floats]
        if half.dtype != "bfloat16":
            found.append(f"{half.dtype} has no kernels in OpenVINO on CPU: float operators run in float32.")
        elif kept:
            found.append(f"{len(kept)} operators planned for float32 run in bfloat16: the file has one float type.")
    elif plan is None and asked == "bf16":
        layers = [graph.argument(node, "weight") for node in graph.calls(program.graph, *ops.WEIGHTED)]
        weights = [graph.constant(program.graph_module, weight) for weight in layers]
        if wider := sum(weight is not None and weight.dtype is torch.float32 for weight in weights):
            found.append(f"{wider} layers kept in float32 run in bfloat16: the file has one float type.")
    return found


def _write(
    runtime: Any, model: ir.Model, precision: str, files: tuple[Path, ...], cpu: str, arrays: list[np.ndarray]
) -> tuple[list[ExecutedNode], int, list[str]]:
    """Write the IR, weights first, once OpenVINO has compiled it, in INT8 where bits do not answer the same arrays so;
    return what it executes, how many layers count bits, and why others do not.
    """
    from optimize.targets.onnx_graph.export import save
    from optimize.targets.openvino.bits import count_bits
    from optimize.targets.openvino.coverage import read_kernels
    from optimize.targets.openvino.runner import compile_file, core, label, refusing

    def compiled(model: Any, files: tuple[Path, ...]) -> tuple[Any, frozenset[str]]:
        names = label(model, precision, cpu)
        runtime.serialize(model, *files)
        return compile_file(*files), names

    description, weights = files
    with tempfile.TemporaryDirectory() as folder, whole(description) as written, whole(weights) as binary:
        onnx = Path(folder) / "model.onnx"
        save(model, onnx)
        with refusing("convert the model"):
            converted = core().read_model(onnx)
        bits = converted.clone()
        counted, waiting = count_bits(bits, runtime)
        signs = [_SIGNS.format(waiting, _FREE)] if waiting else []
        if not counted:
            return read_kernels(*compiled(converted, (written, binary))), 0, signs
        in_bytes = compiled(converted, (onnx.with_suffix(".xml"), onnx.with_suffix(".bin")))
        reason = "answers otherwise in bits"
        try:
            in_bits = compiled(bits, (written, binary))
            if _alike(in_bytes[0], in_bits[0], arrays, precision):
                return read_kernels(*in_bits), counted, signs
        except Refused:
            reason = "cannot compile them in bits"
        runtime.serialize(converted, written, binary)
        return read_kernels(*in_bytes), 0, [*signs, _SIGNS.format(counted, reason)]


def _alike(want: Any, found: Any, arrays: list[np.ndarray], precision: str) -> bool:
    """Say whether two compiled models answer alike but for the last bits."""
    from optimize.distances import output_error
    from optimize.targets.openvino.runner import core, usable_precision

    most = _LAST_BITS[usable_precision(core(), precision)]
    answers = zip(want(arrays).values(), found(arrays).values(), strict=True)
    try:
        errors = [output_error(to_tensor(one), to_tensor(other)) for one, other in answers]
    except VerificationFailed:  # one of them is not finite
        return False
    return all(error <= most * largest for error, largest in errors)


def _output_layers(model: ir.Model) -> dict[str, str]:
    """Return the name of each output by the node that computes it: OpenVINO calls that node so."""
    producers = [(value, value.producer()) for value in model.graph.outputs]
    return {str(node.name): str(value.name) for value, node in producers if node is not None}
