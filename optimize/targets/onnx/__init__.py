"""ONNX for ONNX Runtime: float, static INT8, dynamic INT8, integer weights; one target an execution provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from optimize import bounds
from optimize.errors import Refused, TargetUnavailable, UsageError
from optimize.registry import register_target
from optimize.targets.base import (
    FLOATS,
    HALVES,
    INT8,
    Artifact,
    Availability,
    Coverage,
    Probing,
    Runner,
    Support,
    Target,
)
from optimize.targets.onnx.providers import CPU, CUDA, OPENVINO_PROVIDER, TENSORRT_PROVIDER, Provider
from optimize.targets.onnx_graph.external import weights_path
from optimize.targets.onnx_graph.policy import ONNX_RUNTIME, OPENVINO, TENSORRT, Placement

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from optimize.plan import Quantization
    from optimize.program import Program
    from optimize.targets.base import FileValues
    from optimize.targets.probe import Probe

#: Where an ONNX file says which processors its integers were made for.
_SAID = "optimize."
_WRITERS = ("torch", "onnx", "onnx-ir", "onnxscript")
_FEW_KERNELS = "ONNX Runtime has few bfloat16 kernels for CPUs; take"
#: What to take in place of bfloat16, by precision.
_INSTEAD = {
    "bfloat16": "--to openvino or torchscript there, --to onnx-cuda for GPUs.",
    "int8-bfloat16": "--mixed float16, or --to openvino.",
}
_HALF = "float16 halves the file and is not faster; bfloat16 is written, and few CPU kernels take it."
_SAME_AS_INT8 = "Nothing is left to compute in half beside the integers: this is what the INT8 file does."


@register_target
@dataclass(frozen=True)
class Onnx(Target):
    """Writes an ONNX file that any ONNX runtime opens, and runs it with ONNX Runtime on CPU.

    Static INT8 is placed where ONNX Runtime fuses it into integer kernels (``policy.ONNX_RUNTIME``); the coverage is
    read from the graph it really runs. Products with a bias behind them (transformers) are ONNX Runtime's own
    ``MatMulIntegerToFloat``; else the file is standard ONNX. Dynamic INT8 covers linear layers and LSTMs, integer
    weights linear layers and embeddings, with operators that ONNX Runtime alone has.

    Attributes:
        opset: Version of ONNX's operators, 18 to 25; None for 20, 22 with bfloat16. Before 20 there is no Gelu, and
            what stands in its place is fused by runtimes that know the pattern.
        qcdq: Write static integers as QuantizeLinear, Clip and DequantizeLinear, which say their bits to FPGA flows
            (``qonnx``, FINN, hls4ml), in place of integer kernels: ONNX Runtime computes in float then.
    """

    name = "onnx"
    suffix = ".onnx"
    summary = "ONNX file, run with ONNX Runtime on CPU"
    support = Support(("float32", "float16"), INT8, ("float16",), remark=_HALF)
    packages = ("onnx", *CPU.packages)
    profiled = times_layers = packs = True
    endings: ClassVar[tuple[str, ...]] = (".onnx",)
    noun = "ONNX"
    alone = """
import onnxruntime

session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

def f(*arrays):
    return session.run(None, {entry.name: array for entry, array in zip(session.get_inputs(), arrays)})
"""
    alone_cpp = (
        """\
  std::vector<$type> data_$at($count);$free
  const std::vector<int64_t> shape_$at{$sizes};
  inputs.push_back(Ort::Value::CreateTensor<$type>(
      memory, data_$at.data(), data_$at.size(), shape_$at.data(), shape_$at.size()));""",
        """
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <iostream>
#include <vector>

int main() {
  Ort::Env env;
  Ort::Session session(env, $path, Ort::SessionOptions());
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<Ort::Value> inputs;
$feeds
  const std::vector<const char*> names{$inputs};
  const std::vector<const char*> wanted{$outputs};
  auto found = session.Run(Ort::RunOptions(), names.data(), inputs.data(), inputs.size(), wanted.data(), wanted.size());
  for (size_t at = 0; at < found.size(); ++at) {
    std::cout << wanted[at] << " " << found[at].GetTensorTypeAndShapeInfo().GetElementCount() << " values\\n";
  }
}
""",
    )
    numerics = ONNX_RUNTIME.numerics
    #: What executes it.
    provider: ClassVar[Provider] = CPU

    opset: int | None = None
    qcdq: bool = False

    def __post_init__(self) -> None:
        """Check the opset.

        Raises:
            UsageError: It is none that is written.
        """
        try:
            bounds.OPSET(bounds.OPSET.least if self.opset is None else self.opset)
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}.", hint="Leave it out for what most runtimes read.") from error

    def available(self) -> Availability:
        """Say whether the file can be written (always) and run (ONNX Runtime is installed)."""
        from optimize.targets.packaging import versions_of

        versions = versions_of(*_WRITERS, *CPU.packages)
        if any(name in versions for name in CPU.packages):
            return Availability(export=True, run=True, version=versions)
        reason = "ONNX Runtime is not installed"
        return Availability(export=True, run=False, version=versions, reason=reason, install=CPU.install)

    def files(self, path: Path) -> tuple[Path, ...]:
        """Return the file, and the one with its weights where they are too large for it."""
        return tuple(file for file in (path, weights_path(path)) if file == path or file.exists())

    def export(self, program: Program, path: Path) -> Artifact:
        """Write the program as one ONNX file with a free batch, and a second one with its weights above 2 GB.

        Raises:
            Refused: ONNX lacks an operator of the program, or no layer can run in integers.
            TargetUnavailable: The execution provider is not installed.
        """
        from optimize.precision.lowering import holds_half, lower_half
        from optimize.targets.onnx.rewrites import flatten_rows
        from optimize.targets.onnx_graph.export import origins_in, save, to_onnx
        from optimize.targets.onnx_graph.quantize import note_weights
        from optimize.targets.packaging import describe, made_for

        if self.provider is not CPU:  # a file for the CPU can be written for another machine
            self.require()
        lowered = lower_half(program, integers=self.provider.integers)
        model, value_names = to_onnx(lowered, self.opset)
        origins = origins_in(model, value_names)
        note_weights(model, program)
        if self.device == "cpu":
            flatten_rows(model)
        placed = place(lowered, model, value_names, self.provider, qcdq=self.qcdq)
        if cpu := made_for(self, lowered):
            model.metadata_props[f"{_SAID}cpu"] = cpu
        save(model, path)
        artifact = describe(self, lowered, path, precision=program.precision, origins=origins)
        if lowered is not program and not holds_half(lowered):
            artifact = replace(artifact, notes=(*artifact.notes, _SAME_AS_INT8))
        return _seen_running(artifact, placed, self.provider)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Open the file in ONNX Runtime.

        Raises:
            TargetUnavailable: ONNX Runtime is not installed, or has no kernel for an operator of the file.
        """
        from optimize.targets.onnx.runner import OnnxRunner

        return OnnxRunner(artifact, threads=threads, provider=self.provider)

    def open(self, path: Path, *, trust: bool = False) -> Artifact:
        """Describe an ONNX file once it is checked.

        Raises:
            Refused: It is no ONNX file, asks for too much, or takes what is no tensor of numbers.
        """
        from optimize.targets.onnx.reading import files_of
        from optimize.targets.onnx.values import inputs_of, notes_of, outputs_of, precision_of
        from optimize.targets.packaging import describe_file

        model, files = files_of(path, trust=trust)
        inputs, precision = inputs_of(model, path), precision_of(model)
        said = {entry.key.removeprefix(_SAID): entry.value for entry in model.metadata_props}
        found = describe_file(self.name, path, files, inputs, trust=trust, precision=precision, said=said)
        return replace(found, outputs=outputs_of(model), notes=notes_of(model))

    def module(self, path: Path, *, trust: bool = False) -> torch.nn.Module:
        """Read a float graph back.

        Raises:
            Refused: It is refused by the checks, is quantized, or calls an operator that is not read.
        """
        from optimize.targets.onnx.importing import OnnxGraph
        from optimize.targets.onnx.reading import read_checked

        return OnnxGraph(read_checked(path, trust=trust), path)

    def label(self, path: Path, said: Mapping[str, str]) -> None:
        """Append metadata: protobuf joins the lists of two messages that follow each other."""
        import onnx

        entries = [onnx.StringStringEntryProto(key=_SAID + key, value=text) for key, text in said.items()]
        with path.open("ab") as file:
            file.write(onnx.ModelProto(metadata_props=entries).SerializeToString())

    def values(self, artifact: Artifact) -> FileValues:
        """Return the float values that a file computes."""
        from optimize.targets.onnx.values import read_values

        return read_values(artifact.path, trust=not artifact.untrusted)

    def export_plans(self, program: Program, plans: Sequence[Quantization], folder: Path) -> list[Artifact]:
        """Write a file a plan from one translation; the weights of layers in float are the program's, rounded or not.

        Raises:
            Refused: The program cannot be translated, or no layer of a plan can run in INT8.
        """
        import onnx_ir as ir

        from optimize.precision.lowering import lower_half
        from optimize.targets.onnx_graph.export import save, to_onnx
        from optimize.targets.packaging import describe

        program = lower_half(program, integers="float32")
        model, value_names = to_onnx(program, self.opset)
        proto, written = ir.to_proto(model), []
        for index, plan in enumerate(plans):
            path, trial = folder / f"trial_{index}.onnx", ir.from_proto(proto)
            place(replace(program, quantization=plan), trial, value_names)
            save(trial, path)
            written.append(describe(self, program, path, precision=plan.precision, versions={}))
        return written

    def probe(self, asked: Probing) -> Probe:
        """Open the file twice in ONNX Runtime, once with its profiler.

        Raises:
            TargetUnavailable: ONNX Runtime is not installed, or has no kernel for an operator of the file.
        """
        from optimize.targets.onnx.probe import OnnxProbe

        return OnnxProbe(asked)

    def warnings(self, artifact: Artifact) -> tuple[str, ...]:
        """Say that something else than the wanted provider runs the file, or that a CPU will not run it, if so."""
        told = super().warnings(artifact)
        if self.provider is CPU and artifact.precision in _INSTEAD and _SAME_AS_INT8 not in artifact.notes:
            return (*told, f"{self.name} {artifact.precision}: {_FEW_KERNELS} {_INSTEAD[artifact.precision]}")
        if not artifact.providers or artifact.providers[0] == self.provider.name:
            return told
        return (
            *told,
            f"{self.name} {artifact.precision} ran on {artifact.providers[0]}, not on {self.provider.name}: that could "
            "not be opened (its notes say why, as far as ONNX Runtime did; that lists what the provider requires).",
        )


class _OnProvider(Onnx):
    """The same file on an execution provider that must be installed: what it does not take runs on CPU."""

    profiled = times_layers = packs = False
    endings = ()
    alone, alone_cpp = "", ("", "")

    @property
    def device(self) -> str:
        """Where the provider runs."""
        return self.provider.device

    def available(self) -> Availability:
        """Say whether this ONNX Runtime has the provider."""
        from optimize.targets.onnx.runner import import_runtime
        from optimize.targets.packaging import versions_of

        versions = versions_of(*_WRITERS, *CPU.packages)
        if any(name in versions for name in self.provider.packages):
            if self.provider.name in import_runtime().get_available_providers():
                return Availability(export=True, run=True, version=versions)
            reason = f"this ONNX Runtime has no {self.provider.name}"
        else:
            reason = f"ONNX Runtime with the {self.provider.title} provider is not installed"
        others = " ".join(name for name in CPU.packages if name in versions)
        install = f"pip uninstall -y {others} && {self.provider.install}" if others else self.provider.install
        return Availability(export=False, run=False, version=versions, reason=reason, install=install)


@register_target
class OnnxCuda(_OnProvider):
    """Runs the ONNX file with ONNX Runtime's CUDA provider, in float32, float16 or bfloat16."""

    name = "onnx-cuda"
    suffix = ".cuda.onnx"
    summary = "ONNX file, run with ONNX Runtime's CUDA provider (float32, float16, bfloat16)"
    support = Support(FLOATS)
    provider = CUDA


@register_target
class OnnxTensorRT(_OnProvider):
    """Runs the ONNX file with ONNX Runtime's TensorRT provider; INT8 is placed as TensorRT wants it."""

    name = "onnx-tensorrt"
    suffix = ".trt.onnx"
    summary = "ONNX file, run with ONNX Runtime's TensorRT provider"
    support = Support(FLOATS, ("static",), HALVES)
    numerics = TENSORRT.numerics
    provider = TENSORRT_PROVIDER


@register_target
class OnnxOpenVINO(_OnProvider):
    """Runs the ONNX file with ONNX Runtime's OpenVINO provider; INT8 is placed as OpenVINO wants it."""

    name = "onnx-openvino"
    suffix = ".ov.onnx"
    summary = "ONNX file, run with ONNX Runtime's OpenVINO provider on CPU"
    support = Support(("float32",), ("static",))
    numerics = OPENVINO.numerics
    provider = OPENVINO_PROVIDER


def place(
    program: Program, model: ir.Model, value_names: dict[str, str], provider: Provider = CPU, *, qcdq: bool = False
) -> Coverage | None:
    """Write the program's INT8 plan into its ONNX model, in place; None when it has none.

    Args:
        program: The program, whose plan it is.
        model: What ``to_onnx`` returned.
        value_names: Likewise.
        provider: What executes it.
        qcdq: Write a static plan as operators that say its bits.

    Raises:
        Refused: No layer can run in INT8.
    """
    from optimize.targets.packaging import planned_floats, require_layers

    plan = program.quantization
    if plan is None:
        return None
    policy = provider.placement
    if policy is None or (provider is not CPU and plan.mode != "static"):
        raise Refused(
            f"ONNX Runtime's {provider.title} provider has no {plan.precision} kernels.",
            hint="Use --to onnx-tensorrt, tensorrt or onnx for it.",
        )
    placed = _placed(program, model, value_names, policy, qcdq=qcdq)
    require_layers(placed, policy.runtime)
    if plan.mode != "static":
        placed = replace(placed, left_float=(*placed.left_float, *planned_floats(program)))
    return placed


def _placed(
    program: Program, model: ir.Model, value_names: dict[str, str], policy: Placement, *, qcdq: bool
) -> Coverage:
    from optimize.quantization.numerics import planned
    from optimize.targets.onnx.attention import fuse_attention
    from optimize.targets.onnx.dynamic import quantize_dynamic
    from optimize.targets.onnx.packing import pack_blocks, pack_weights
    from optimize.targets.onnx.static import quantize_static
    from optimize.targets.onnx_graph.quantize import quantize_onnx, write_qcdq
    from optimize.targets.onnx_graph.weight_only import quantize_weights

    plan = program.plan
    if plan.mode == "weights":
        placed, stored = quantize_weights(model, program)
        pack_blocks(model, stored)
        return placed
    if qcdq and plan.mode == "static":
        return write_qcdq(model, value_names, plan)
    if policy.runtime != ONNX_RUNTIME.runtime:
        return quantize_onnx(model, value_names, plan, policy)
    if plan.mode == "dynamic":
        placed = quantize_dynamic(model, plan, planned(policy.numerics.weight, plan))
    else:
        placed = quantize_static(model, value_names, plan, policy)
        pack_weights(model, most=7 if plan.bits < 8 else 4)
    fuse_attention(model)
    tables, _ = quantize_weights(model, program, tables=True, whole_rows=True)
    return replace(placed, quantized=(*tables.quantized, *placed.quantized))


def _seen_running(artifact: Artifact, placed: Coverage | None, provider: Provider) -> Artifact:
    """Return the artifact with what ONNX Runtime really runs, and on what."""
    if provider is not CPU:
        from optimize.targets.onnx.runner import OnnxRunner

        runner = OnnxRunner(artifact, provider=provider)
        told = f"It runs on {', '.join(runner.providers)}.", *([runner.refusal] if runner.refusal else [])
        return replace(artifact, coverage=placed, providers=runner.providers, notes=(*artifact.notes, *told))
    coverage, found = _verified(artifact, placed)
    return replace(artifact, coverage=coverage, notes=(*artifact.notes, *found), providers=(provider.name,))


def _verified(artifact: Artifact, placed: Coverage | None) -> tuple[Coverage | None, list[str]]:
    """Return what ONNX Runtime really runs, or what was placed and a note when it is not there to ask."""
    if placed is None and artifact.precision != "float16":
        return None, []
    from optimize.targets.onnx.coverage import read_coverage, read_half

    try:
        halves = read_half(artifact.path) if artifact.precision.endswith("float16") else ""
        return placed and read_coverage(artifact.path, placed), [halves] if halves else []
    except TargetUnavailable as error:
        return placed, [f"What runs was not verified in the runtime: {error.what}"]
