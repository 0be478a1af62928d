"""From a program to a float ONNX model whose values and layers are known by the program's names.

So names in the file, and in what runtimes make of it, lead back to the calls of the program.
"""

from __future__ import annotations

import functools
import logging
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast
from unittest import mock

import onnx
import onnx_ir as ir
import torch
from onnxscript import opset20 as op
from onnxscript.optimizer import fold_constants
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
from torch.onnx._internal.exporter._registration import ONNXRegistry

from optimize import graph, ops
from optimize.dimensions import BATCH
from optimize.errors import Refused, VerificationFailed, first_line
from optimize.files import whole
from optimize.graph import aten
from optimize.named import free_name
from optimize.normal_form import is_settled
from optimize.program import Program
from optimize.progress import quiet
from optimize.targets.onnx_graph import external
from optimize.targets.onnx_graph.attention import transpose_keys, zero_unseen_rows
from optimize.targets.onnx_graph.external import weight_bytes, weights_path, write_split
from optimize.targets.onnx_graph.lifting import lifted
from optimize.targets.onnx_graph.nodes import REPLACED, readers, used_names
from optimize.targets.onnx_graph.shapes import settle_reshapes
from optimize.targets.onnx_graph.taking_apart import APART, is_unknown
from optimize.targets.onnx_graph.whole_numbers import computes_whole_numbers, spellings
from optimize.targets.probe import Calls, module_of
from optimize.tracing import light_traces, shape_rules

#: The oldest opset with Gelu and LayerNormalization as one operator, which runtimes have fused kernels for; everything
#: released since 2024 reads it (ONNX Runtime 1.17, TensorRT 10, OpenVINO 2024.0). Newer ones add nothing used here.
OPSET = 20
#: The first opset whose convolutions and poolings take bfloat16.
OPSET_BFLOAT16 = 22
#: Written on each node: the program node it came from.
ORIGIN = "optimize.node"

_WEIGHT_ARRANGEMENT = {"Slice", "Concat", "Unsqueeze", "Transpose", "Squeeze", "Reshape"}
_FOLLOWING = {"QuantizeLinear", "DequantizeLinear", "Relu", "Clip"}
_LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU"}
_BATCH_NORM, _SORT = aten.batch_norm.default, aten.sort.stable
#: Calls that the exporter would write as something else: means of a divisor of their own, what BatchNorm has counted,
#: a logarithm of which nothing is left far below zero.
_MISREAD = (
    *ops.AVERAGE_POOLS[1:],
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten.special_log_ndtr.default,
)
#: Resizes that weigh all pixels under a new one.
_SMOOTH_TO_SIZE = (aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default)
_SMOOTH = (aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec, *_SMOOTH_TO_SIZE)
_from_torchlib = ONNXRegistry.from_torchlib
#: What ONNX Runtime appends to names when it changes a layout or fuses, and OpenVINO when it splits a bias off.
_ENDINGS = re.compile(r"(_token_\d+|_nchwc|/MatMulAddFusion|/WithoutBiases)+$")


def to_onnx(program: Program, opset: int | None = None) -> tuple[ir.Model, dict[str, str]]:
    """Translate a program to ONNX in float: the names of its inputs and outputs, a free batch.

    Weighted nodes are named after their modules, and every node carries the program node it came from as metadata
    (``ORIGIN``). The exporter folds a BatchNorm that ``FuseConvBN`` would fold, if it is still there.

    Args:
        program: A float program; its quantization plan is not looked at.
        opset: Of the file; None for the oldest that has the program's operators as one each.

    Returns:
        The model, and the ONNX value of each program node that has one, by name.

    Raises:
        Refused: The exporter lacks an operator; the message names it and its layer. Or the opset lacks bfloat16.
    """
    opset = _opset(program, opset)
    _refuse_misread(program)
    program = _with_tops(_with_smooth_resizes(program))
    exported = _exported(program, opset)
    calls = exported_calls(program, exported)
    translated = _translate(program, exported, opset)
    model, decomposed = translated.model, translated.exported_program
    assert decomposed is not None
    _check_free(program, decomposed)
    names = trace_names(program, calls, exported, decomposed)
    _name_dimensions(program, translated)
    with quiet("onnxscript", level=logging.ERROR):
        fold_constants(model, should_fold=lambda node: node.op_type in _WEIGHT_ARRANGEMENT or None)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    _name_values(program, model, names)
    _name_nodes(program, model, names)
    transpose_keys(model)
    zero_unseen_rows(model)
    settle_reshapes(model)
    present = used_names(model.graph)
    return model, {node: value for node, value in names.values.items() if value in present}


def save(model: ir.Model, path: Path) -> None:
    """Check a model (types, shapes, operators) and write it; weights that one file cannot hold go into a second one.

    Every node is named after its module, so that whatever shows a file names the layers of the model: those that
    targets added (quantizing, casts, padding) go by the layer that computes what they read, or that reads them.

    Raises:
        Refused: ``onnx.checker`` rejects it.
    """
    _name_added(model.graph)
    weights_path(path).unlink(missing_ok=True)
    try:
        if weight_bytes(model) > external.LARGEST_BYTES:
            proto = write_split(model, path)
        else:
            proto = ir.to_proto(model)
            onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise Refused(f"The exported ONNX model is not valid: {first_line(error)}") from error
    _slim(proto)
    with whole(path) as temporary:
        onnx.save_model(proto, temporary)


def _slim(proto: onnx.ModelProto) -> None:
    """Drop what any runtime infers or no runtime reads: the shapes of intermediate values, our own metadata."""
    del proto.graph.value_info[:]
    for node in proto.graph.node:
        del node.metadata_props[:]


def _translate(program: Program, exported: torch.export.ExportedProgram, opset: int) -> torch.onnx.ONNXProgram:
    try:
        # It traces again, and would fix lengths behind recurrent layers; ONNX has these two, others are taken apart.
        with (
            quiet("torch.onnx", "onnxscript", "onnx_ir", level=logging.ERROR),
            shape_rules(aten.lstm.input, aten.gru.input),
            light_traces(),
            mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(_translations)),
        ):
            translated = torch.onnx.export(
                exported,
                dynamo=True,
                optimize=True,
                opset_version=opset,
                input_names=list(program.input_names),
                verbose=False,
            )
    except Exception as error:
        raise _refusal(program, error) from error
    assert translated is not None
    return translated


@functools.cache
def _translations(**options: Any) -> ONNXRegistry:
    """Return the exporter's table of an opset, with BatchNorm as one operator, which it takes apart else.

    It parses the source of each of its 500 functions anew for every export: half a second for the same table.
    """
    with quiet("torch.onnx", level=logging.ERROR):  # about operators of packages that are not there
        registry = _from_torchlib(**options)
    known, *_ = registry.get_decomps(aten._native_batch_norm_legit_no_training.default)

    def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
        _, momentum, eps, _ = rest
        return known.onnx_function(x, weight, bias, mean, var, momentum, eps)[0]

    def log_sigmoid(x: Any) -> Any:  # of the exporter's, Log(Sigmoid(x)), nothing is left below -18
        return op.Neg(op.Softplus(op.Neg(x)))

    def grid_sampler_3d(x: Any, grid: Any, interpolation: int, padding: int, is_aligned: bool) -> Any:
        return op.GridSample(
            x,
            grid,
            mode=("linear", "nearest")[interpolation],
            padding_mode=("zeros", "border", "reflection")[padding],
            align_corners=int(is_aligned),
        )

    registry.register_op(_BATCH_NORM, batch_norm)
    registry.register_op(aten.grid_sampler_3d.default, grid_sampler_3d)
    registry.register_op(aten.log_sigmoid.default, log_sigmoid)
    return registry


def _check_free(program: Program, decomposed: torch.export.ExportedProgram) -> None:
    """Check that what is free in a program is free in what the exporter made of it.

    Raises:
        Refused: It became a constant: a file would answer wrongly at other sizes.
    """
    values = {node.name: node.meta["val"] for node in decomposed.graph.nodes if node.op == "placeholder"}
    taken = dict(zip(program.placeholders, decomposed.graph_signature.user_inputs, strict=True))
    for node, dim, name in program.free_places():
        size = values[taken[node]].shape[dim]
        if isinstance(size, int) or size.node.maybe_as_int() is not None:
            fixed = "leave the dimension out of --dynamic"
            if name == BATCH:
                fixed = "fix it: static_batch in a recipe, in Python capture(..., dynamic_batch=False)"
            raise Refused(
                f"'{name}' cannot stay free in ONNX: torch's exporter makes a constant of it ({int(size)}).",
                hint=f"nn.RNN is written step by step: use nn.LSTM or nn.GRU, or {fixed}.",
            )


def _refuse_misread(program: Program) -> None:
    """Refuse what the exporter would write as something else."""
    for call in graph.calls(program.graph, *_MISREAD):
        if not graph.has_argument(call, "divisor_override") or graph.argument(call, "divisor_override"):
            raise Refused(
                f"ONNX has no translation of the operator aten.{graph.op_name(call)} as '{graph.origin(call)}' has it.",
                hint="Write the layer with standard operators, or use --to torchscript.",
            )
    for layer in program.graph.find_nodes(op="call_function", target=aten.lstm.input):
        hidden, cell = (state.meta["val"].shape[-1] for state in layer.args[1])
        if hidden != cell:
            raise Refused(
                f"ONNX has no LSTM whose outputs are projected (proj_size), as those of '{graph.origin(layer)}' are.",
                hint="Train one without proj_size, or use --to torchscript.",
            )


def _exported(program: Program, opset: int) -> torch.export.ExportedProgram:
    """Return a program as the exporter takes it: as it stands, where taking it apart would change nothing.

    To export it, and to take it apart, torch traces the whole anew, which is most of what an export to ONNX takes.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    registry = _translations(opset_version=max(opset, TORCHLIB_OPSET))
    spelled = [node for node in calls if _is_mean(node) or graph.is_call(node, *ops.TRANSPOSED_CONVOLUTIONS)]
    others = {node.target for node in calls if node not in spelled}
    apart = {
        target: way
        for target, way in APART.items()
        if not registry.is_registered(target) or any(is_unknown(target, node) for node in calls)
    }
    known = not others & apart.keys() and all(
        registry.is_registered(target) for target in others if isinstance(target, torch._ops.OpOverload)
    )
    is_whole = computes_whole_numbers(program.graph)
    if known and not is_whole and is_settled(program.graph):
        exported = lifted(program)
        exported.run_decompositions = lambda table: _spelled(exported)
        return exported
    exported = program.export()
    take_apart = exported.run_decompositions
    if any(graph.is_call(node, _BATCH_NORM) and graph.argument(node, "training") for node in calls):
        apart[_BATCH_NORM] = _BATCH_NORM.decompose
    exported.run_decompositions = lambda table: _spelled(
        take_apart({**table, **apart, **(spellings(table) if is_whole else {})})
    )
    return exported


def _is_mean(node: fx.Node) -> bool:
    return graph.is_call(node, aten.adaptive_avg_pool2d.default) and node.args[1] == [1, 1]


def _spelled(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Write the mean over an image and transposed convolutions as the exporter would, in place.

    Nearly all convolutional networks have the first, and those that make images the second. Quotients of sizes that may
    be negative, such as ``-(-n // 2)``, are rounded down, which the exporter leaves out: what has no rest needs none.
    """
    for node in exported.graph.nodes:
        if node.target is operator.floordiv and not all(map(_is_natural, _numbers(node))):
            node.update_arg(0, _without_rest(node))
        if node.target is aten.clamp.default and node.meta["val"].is_floating_point():
            node.args = tuple(map(_as_float, node.args))
            node.kwargs = {name: _as_float(number) for name, number in node.kwargs.items()}
        if _is_mean(node):
            node.target, node.args = aten.mean.dim, (node.args[0], [-1, -2], True)
        elif graph.is_call(node, *ops.TRANSPOSED_CONVOLUTIONS):
            x, weight, bias, stride, padding, outer, groups, dilation = node.args
            node.target = aten.convolution.default
            node.args = (x, weight, bias, stride, padding, dilation, True, outer, groups)
    return exported


def _as_float(number: Any) -> Any:
    """Return a whole number as a float: the exporter knows no clamp between one of each."""
    return float(number) if type(number) is int else number


def _numbers(node: fx.Node) -> Any:
    """Return what the arguments of a node stand for: whole numbers, or what is known of them."""
    return fx.map_arg(node.args, lambda each: each.meta["val"])


def _is_natural(number: Any) -> bool:
    return statically_known_true(number >= 0)


def _without_rest(node: fx.Node) -> fx.Node:
    """Return the dividend less what is left of it when it is divided and rounded down, as ONNX has rests."""
    (size, by), (number, divisor) = node.args, _numbers(node)
    with node.graph.inserting_before(node):
        rest = node.graph.call_function(operator.mod, (size, by))
        even = node.graph.call_function(operator.sub, (size, rest))
    rest.meta["val"], even.meta["val"] = number % divisor, number - number % divisor
    return even


def _with_smooth_resizes(program: Program) -> Program:
    """Write resizes that smooth (``antialias=True``) as products with a matrix for each axis, on a copy.

    ONNX has no attribute for what torch does with corners that are aligned, or with a factor that divides nothing;
    OpenVINO weighs other pixels. Free sizes are left to the exporter.
    """
    sizes = [size for node in graph.calls(program.graph, *_SMOOTH) for size in node.meta["val"].shape[-2:]]
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return program
    copy = program.clone()
    for node in graph.calls(copy.graph, *_SMOOTH):
        matrices = {"rows": _resizing(node, -2), "columns": _resizing(node, -1).T}
        with copy.graph.inserting_before(node):
            rows, columns = (
                copy.graph.get_attr(graph.store(copy.graph_module, f"{node.name}.{name}", matrix, share=True))
                for name, matrix in matrices.items()
            )
            narrow = copy.graph.call_function(aten.matmul.default, (node.args[0], columns))
        narrow.meta = dict(node.meta)
        node.target, node.args = aten.matmul.default, (rows, narrow)
    copy.refresh()
    return copy


def _with_tops(program: Program) -> Program:
    """Write stable sorts as ONNX has them, all of whose own are, and take no more than is read; on a copy."""
    if not any(graph.calls(program.graph, _SORT)):
        return program
    copy = program.clone()
    for node in graph.calls(copy.graph, _SORT):
        value, dim, is_falling = (graph.argument(node, name) for name in ("self", "dim", "descending"))
        shape = value.meta["val"].shape
        dims, length = len(shape), shape[dim] if shape else None
        read = [reader for part in node.users for reader in part.users]
        cuts = {str(cut.args[1:]) if graph.is_call(cut, aten.slice.Tensor) else "" for cut in read}
        taken: tuple[Any, ...] = read[0].args[1:] if len(cuts) == 1 and "" not in cuts else (0, None, None, None)
        axis, start, end, step = taken
        is_first = start == 0 and step == 1 and isinstance(end, int) and isinstance(length, int) and 0 < end <= length
        if is_first and axis % dims == dim % dims:
            node.target, node.args = aten.topk.default, (value, end, dim, is_falling, True)
            for cut in read:
                cut.replace_all_uses_with(cast(fx.Node, cut.args[0]))
                copy.graph.erase_node(cut)
        else:
            node.target, node.args = aten.sort.default, (value, dim, is_falling)
        node.kwargs, node.meta["val"] = {}, node.target(value.meta["val"], *node.args[1:])
        for part in node.users:
            part.meta["val"] = node.meta["val"][part.args[1]]
    copy.refresh()
    return copy


def _resizing(node: fx.Node, axis: int) -> torch.Tensor:
    """Return the matrix ``[made, size]`` by which a resize makes the places of one axis of an image."""
    x, _, aligned, *factors = cast(tuple[Any, ...], node.args)
    size, made = (each.meta["val"].shape[axis] for each in (x, node))
    asked: tuple[Any, ...] = ([made, size], aligned, None)
    if node.target in _SMOOTH_TO_SIZE:
        asked = ([made, size], aligned, factors[axis], None)
    elif factors[0] is not None:
        asked = (None, aligned, [factors[0][axis], 1.0])
    image = torch.eye(size, dtype=torch.float64)[None, None]
    return cast(Callable[..., torch.Tensor], node.target)(image, *asked)[0, 0].to(node.meta["val"].dtype)


def _opset(program: Program, asked: int | None) -> int:
    least = OPSET_BFLOAT16 if any(weight.dtype is torch.bfloat16 for weight in program.graph_module.parameters()) else 0
    if asked is not None and asked < least:
        raise Refused(
            f"Opset {asked} of ONNX has no convolutions and poolings in bfloat16.",
            hint=f"Ask for opset {least} or more.",
        )
    return asked or max(OPSET, least)


def _refusal(program: Program, error: BaseException) -> Refused:
    """Name the operator that the exporter lacks, and the layers that call it."""
    text, last = str(error), error
    while last.__cause__ is not None:
        last = last.__cause__
        text = f"{text}\n{last}"
    missing = re.search(r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)'", text)
    if missing is None:
        return Refused(f"The program cannot be exported to ONNX: {first_line(last)}")
    # The exporter may have taken the operator apart: special_bessel_j0 fails as prims.bessel_j0, or matrix_exp as
    # linalg_matrix_exp.
    name, calls = missing[2], [node for node in program.graph.nodes if node.op == "call_function"]
    layers = [node for node in calls if (op := graph.op_name(node)).endswith(name) or name.endswith(f"_{op}")]
    where = f" (in '{graph.origin(layers[0])}')" if layers else ""
    hint = "Write the layer with standard operators, or use --to torchscript."
    if layers and all(map(graph.weights_behind, layers)):
        hint = "It is computed of weights alone: let that be done once (--fuse, FuseConvBN())."
    return Refused(f"ONNX has no translation of the operator {missing[1]}.{name}{where}.", hint=hint)


def _name_dimensions(program: Program, translated: torch.onnx.ONNXProgram) -> None:
    """Call free dimensions as the program does (``batch``) instead of by the tracer's symbols."""
    renamed: dict[str | ir.SymbolicDim, str] = {}
    for value, dims in zip(translated.model.graph.inputs, program.dynamic, strict=True):
        assert value.shape is not None
        renamed.update({str(value.shape[dim]): name for dim, name in dims.items()})
    translated.rename_axes(renamed)


def _name_values(program: Program, model: ir.Model, names: Names) -> None:
    """Name the outputs as the program does; an intermediate value that is an output changes its name in the map too."""
    outputs = dict(zip(program.output_names, model.graph.outputs, strict=True))
    for value in [value for node in model.graph for value in node.outputs] + list(model.graph.initializers.values()):
        if value.name in outputs and value is not outputs[value.name]:  # inside, where nobody asks for it by name
            _rename(value, f"{value.name}_inside", names)
    for name, value in outputs.items():
        _rename(value, name, names)


def _rename(value: ir.Value, new: str, names: Names) -> None:
    old, value.name = value.name, new
    names.values.update({node: new for node, name in names.values.items() if name == old})


def _name_nodes(program: Program, model: ir.Model, names: Names) -> None:
    """Name weighted nodes after their modules and the others after module and operator; drop the exporter's metadata.

    That metadata holds stack traces with the paths of the user's source files.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    made = {value: nodes[node] for node, value in names.values.items() if node in nodes}
    taken: set[str] = set()
    for entry in sorted(model.graph, key=lambda entry: not _is_layer(entry)):
        traced = re.match(r"%(\w+)", entry.metadata_props.get("pkg.torch.onnx.fx_node", ""))
        source = nodes.get(names.sources.get(traced[1], "") if traced else "") or _made_for(entry, made)
        entry.metadata_props.clear()
        if source is not None:
            source = _before_norm(source) if _is_layer(entry) else source
            entry.metadata_props[ORIGIN] = source.name
            path = graph.origin(source)
            entry.name = free_name(path if _is_layer(entry) else f"{path}/{entry.op_type}", taken)
            taken.add(entry.name)
        for value in entry.outputs:
            value.metadata_props.clear()
    model.graph.metadata_props.clear()


def _made_for(entry: ir.Node, made: Mapping[str, torch.fx.Node]) -> torch.fx.Node | None:
    """Return the program node whose value an operator computes, or computes a step of; None where there is none."""
    behind = [value for reader in readers(entry.outputs[0]) for value in reader.outputs]
    names = (str(value.name) for value in (*entry.outputs, *behind))
    return next((made[name] for name in names if name in made), None)


#: What the exporter calls a node that nobody named.
_AUTOMATIC = re.compile(r"node_\w+_\d+")


def _name_added(whole: ir.Graph) -> None:
    """Name what nobody named, ``path/Operator``: roundings and clamps by what they follow, others by who reads them."""
    order = list(whole)
    taken = {node.name for node in order if node.name and not _AUTOMATIC.fullmatch(node.name)}
    names = {node: str(node.meta.get(REPLACED) or node.name or "") for node in order}
    told = {node: "" if _AUTOMATIC.fullmatch(name) else name for node, name in names.items()}
    paths = {node: module_of(name) for node, name in told.items()}
    ahead: dict[ir.Node, str] = {}
    for node in reversed(order):
        ahead[node] = paths[node] or next((ahead[one] for one in readers(node.outputs[0]) if ahead.get(one)), "")
    for node in order:
        makers = [value.producer() for value in node.inputs if value is not None]
        before = next((paths[maker] for maker in makers if maker is not None and paths.get(maker)), "")
        paths[node] = (paths[node] or before if node.op_type in _FOLLOWING else ahead[node]) or ahead[node] or before
        if node.name not in taken and paths[node]:
            node.name = free_name(f"{paths[node]}/{node.op_type}", taken)
            taken.add(node.name)


def _is_layer(entry: ir.Node) -> bool:
    return entry.op_type in _LAYERS and ir.convenience.get_const_tensor(entry.inputs[1]) is not None  # type: ignore[arg-type]


def _before_norm(node: torch.fx.Node) -> torch.fx.Node:
    """Return the layer that the exporter folded a BatchNorm into, for the BatchNorm; any other node as it is."""
    inner = node.args[0] if graph.is_call(node, graph.aten.batch_norm.default) else node
    return inner if isinstance(inner, torch.fx.Node) else node


_SIZES = (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int)


@dataclass(frozen=True)
class Names:
    """How a program's names are found again.

    Attributes:
        values: Final name of the tensor each program node computes, where one node computes it.
        sources: The program node that each final node came from.
    """

    values: dict[str, str]
    sources: dict[str, str]


def trace_names(
    program: Program,
    originals: Mapping[str, str],
    exported: torch.export.ExportedProgram,
    decomposed: torch.export.ExportedProgram,
) -> Names:
    """Follow each program node through re-export and decomposition, which each rename nodes.

    Re-export keeps the order of the calls, so the two graphs are read side by side; a decomposition records the node it
    expands, and the last call of an expansion computes its value.

    Args:
        originals: :func:`exported_calls` of both.
        exported: What the exporter had, or took apart.
        decomposed: The exporter's own graph, after whose nodes ONNX values are named.
    """
    expanded = {node.name: node for node in exported.graph.nodes}
    values = {name: name for name in program.input_names}
    sources: dict[str, str] = {}
    for node in decomposed.graph.nodes:
        source = node.name if decomposed is exported else _source(node)
        if node.op != "call_function" or source not in originals:
            continue
        sources[node.name] = originals[source]
        for match in _same_value(expanded[source], node):
            if match.name in originals:
                values[originals[match.name]] = node.name
    return Names(values, sources)


def exported_calls(program: Program, exported: torch.export.ExportedProgram) -> dict[str, str]:
    """Return the program node of each call of the re-exported graph, by name.

    Raises:
        VerificationFailed: Re-export changed the sequence of calls.
    """
    originals = {}
    for mine, other in zip_longest(_tensor_calls(program.graph), _tensor_calls(exported.graph)):
        if mine is None or other is None or mine.target != other.target:
            where = mine.name if mine is not None else "the end"
            raise VerificationFailed(f"Re-export changed the sequence of calls at '{where}'.")
        originals[other.name] = mine.name
        parts = {user.args[1]: user.name for user in mine.users if user.target is operator.getitem}
        for user in other.users:
            if user.target is operator.getitem and user.args[1] in parts:
                originals[user.name] = parts[user.args[1]]
    return originals


def _tensor_calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls in order, without the arithmetic on sizes and the unpacking that re-export writes anew."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node.target not in _SIZES
        and node.target is not operator.getitem
        and isinstance(node.meta.get("val"), torch.Tensor | list | tuple)
    ]


def _source(node: fx.Node) -> str:
    history = node.meta.get("from_node") or []
    return history[0].name if history else ""


def _same_value(source: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Return the re-exported nodes whose value ``node`` computes: the source, or its part of the same index."""
    found, wanted = node.meta.get("val"), source.meta.get("val")
    if not isinstance(found, torch.Tensor):
        return []
    if isinstance(wanted, torch.Tensor):
        return [source] if str(found.shape) == str(wanted.shape) else []
    if node.target is not operator.getitem:
        return []
    return [user for user in source.users if user.target is operator.getitem and user.args[1] == node.args[1]]


@dataclass(frozen=True)
class FileNames:
    """The calls of a graph, and what a file calls them.

    Attributes:
        calls: The graph: of the program where there is one, else of the file.
        origins: Call by the name of a node in the file, or of a value that it computes.
    """

    calls: Calls
    origins: Mapping[str, str]

    def claimed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the calls that some names of a runtime stand for, endings dropped."""
        found = (self.origins.get(name) for name in map(plain_name, names))
        return tuple(dict.fromkeys(name for name in found if name))


def plain_name(name: str) -> str:
    """Return a name as the file has it.

    >>> plain_name("conv_nchwc"), plain_name("conv_token_3")
    ('conv', 'conv')
    """
    return _ENDINGS.sub("", name)


def origins_in(model: ir.Model, values: Mapping[str, str]) -> dict[str, str]:
    """Return the call of the program that each node and value of its ONNX form is, by name, nodes before values.

    Args:
        model: As ``to_onnx`` returned it; OpenVINO's files keep its names.
        values: What it returned beside it.
    """
    nodes = {str(node.name): node.metadata_props[ORIGIN] for node in model.graph if ORIGIN in node.metadata_props}
    return {**{value: name for name, value in values.items()}, **nodes}
