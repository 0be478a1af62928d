"""TorchScript files: code for torch's own interpreter, opened without trust where its operators are all pure.

A TorchScript file is compiled when it is loaded and may compute then (``__setstate__``), so it is loaded in a confined
process alone. There every function that torch compiled is read, not the text it was compiled from: each operator must
be in a table (`operators`, and below what belongs to the language), and what loops and calls come to must have a bound
(`turns`). Then nothing that is run later can write, read files, or go on for ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from optimize import sandbox
from optimize.errors import Refused
from optimize.load import operators, turns
from optimize.load.archive import Archive
from optimize.load.operators import words

_HINT = "Add --trust if you trust this file."
#: The language: constants, containers, calls, branches. ``prim::`` goes before each.
_LANGUAGE = words(
    """
    Constant GetAttr SetAttr CallMethod CallFunction If Loop ListConstruct ListUnpack TupleConstruct TupleUnpack
    TupleIndex TupleSlice DictConstruct NumToTensor RaiseException Uninitialized unchecked_cast
    unchecked_unwrap_optional isinstance device dtype layout is_cuda is_cpu is_quantized is_sparse is_mkldnn
    requires_grad shape data grad min max abs tolist CreateObject EnumName EnumValue ImplicitTensorToNum Store
    Load rangelist StringIndex type itemsize nbytes T mT H mH name index ModuleContainerIndex Enter Exit annotate
    is_nested is_sparse_csr is_sparse_csc is_sparse_bsr is_sparse_bsc is_xpu is_xla is_mps is_ipu is_vulkan
    is_maia is_meta is_mtia is_hpu
    """
)
#: Of numbers, texts and containers. ``aten::`` goes before each. ``replace`` is none of them: it may double a text each
#: time, and takes the square of its length.
_SCALARS = words(
    """
    __getitem__ _set_item __contains__ __is__ __isnot__ __not__ __derive_index __range_length
    __round_to_zero_floordiv len append extend insert pop clear copy keys values items get setdefault update dict
    list reverse sorted index Int Float Bool Complex Size str ord chr IntImplicit FloatImplicit ScalarImplicit
    ComplexImplicit floordiv mathremainder modf fabs factorial gcd degrees radians size dim numel device
    is_floating_point is_complex is_contiguous is_non_overlapping_and_dense stride storage_offset element_size
    is_signed is_conj is_neg format percentFormat join startswith endswith strip lower upper split
    find _unwrap_optional warn to cpu _infer_size broadcast_shapes tensor as_tensor ScalarType
    is_grad_enabled set_grad_enabled is_autocast_enabled is_autocast_cpu_enabled is_scripting get_device
    _no_grad_embedding_renorm_ isfinite isinf isnan ceil floor round exp sqrt log pow sin cos tan atan2 __upsample
    __upsample_bilinear __upsample_nearest __interpolate dequantize quantize_per_tensor quantize_per_channel
    quantize_per_tensor_dynamic int_repr q_scale q_zero_point q_per_channel_scales q_per_channel_zero_points
    q_per_channel_axis qscheme fake_quantize_per_tensor_affine fake_quantize_per_channel_affine zero_ fill_
    hardtanh_ _autocast_to_full_precision _autocast_to_reduced_precision nonzero_numpy remove count requires_grad_
    equal quantized_lstm quantized_gru _upsample_lanczos2d_aa empty empty_like new_empty
    """
)
#: Of integers, written by quantization. ``quantized::`` goes before each.
_QUANTIZED = words(
    """
    add add_out add_relu add_relu_out add_scalar add_scalar_relu batch_norm batch_norm1d batch_norm1d_relu
    batch_norm2d batch_norm2d_relu batch_norm3d batch_norm3d_relu batch_norm_relu cat cat_relu celu conv1d
    conv1d_relu conv1d_dynamic conv2d conv2d_relu conv2d_add conv2d_add_relu conv2d_dynamic conv3d conv3d_relu
    conv3d_dynamic conv_transpose1d conv_transpose2d conv_transpose3d conv_transpose1d_dynamic
    conv_transpose2d_dynamic conv_transpose3d_dynamic conv1d_prepack conv1d_unpack conv2d_prepack conv2d_unpack
    conv3d_prepack conv3d_unpack conv_transpose1d_prepack conv_transpose1d_unpack conv_transpose2d_prepack
    conv_transpose2d_unpack conv_transpose3d_prepack conv_transpose3d_unpack elu embedding_4bit
    embedding_4bit_prepack embedding_4bit_unpack embedding_bag_4bit embedding_bag_4bit_prepack
    embedding_bag_4bit_rowwise_offsets embedding_bag_4bit_unpack embedding_bag_byte embedding_bag_byte_prepack
    embedding_bag_byte_rowwise_offsets embedding_bag_byte_unpack embedding_bag_prepack embedding_bag_unpack
    embedding_byte group_norm hardswish instance_norm layer_norm leaky_relu linear linear_dynamic
    linear_dynamic_fp16 linear_leaky_relu linear_prepack linear_prepack_fp16 linear_relu linear_relu_dynamic
    linear_tanh linear_unpack linear_unpack_fp16 linear_with_input_q_dq_qweight_dq_output_fp32
    make_quantized_cell_params make_quantized_cell_params_dynamic make_quantized_cell_params_fp16 matmul mul
    mul_relu mul_scalar mul_scalar_relu prelu quantized_gru_cell_dynamic quantized_lstm_cell_dynamic
    quantized_rnn_relu_cell_dynamic quantized_rnn_tanh_cell_dynamic relu6 sigmoid softmax threshold
    """
)
_TABLES = {"prim": _LANGUAGE, "aten": _SCALARS, "quantized": _QUANTIZED}
#: Native classes whose methods may be called: the packed weights of quantized layers.
_CLASSES = ("__torch__.torch.classes.quantized.", "__torch__.torch.classes.rnn.")
_NATIVE = "__torch__.torch.classes."


def read(path: Path, name: str) -> torch.jit.ScriptModule:
    """Load a TorchScript file on the CPU and check every function in it; to be called in a confined process.

    Raises:
        Refused: It calls an operator that is not listed, or loops on data; the message names it.
    """
    _refuse_code_at_load(path, name)
    unit: Any = torch._C.CompilationUnit()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        found = torch._C.import_ir_module(unit, str(path), torch.device("cpu"), {}, False)  # type: ignore[call-arg]
        for function, problem in _found(unit.get_functions(), found):
            raise Refused(f"'{name}' is a TorchScript file whose function '{function}' {problem}.", hint=_HINT)
        return torch.jit._recursive.wrap_cpp_module(found)


def _refuse_code_at_load(path: Path, name: str) -> None:
    """Where nothing keeps this process from writing, refuse a file that computes while it is loaded.

    Raises:
        Refused: It has a ``__setstate__``.
    """
    if sandbox.is_write_protected():
        return
    with Archive(path, name) as archive:
        for member in archive:
            if not member.startswith(("data/", "constants/")) and b"__setstate__" in archive.read(member):
                raise Refused(
                    f"'{name}' is a TorchScript file that computes while it is loaded ({member}), and this system has "
                    "nothing to keep it from writing files then.",
                    hint=_HINT,
                )


def read_trusted(file: Any) -> torch.jit.ScriptModule:
    """Load a TorchScript file on the CPU, whatever it calls."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.load(file, map_location="cpu")


def _found(functions: Sequence[Any], module: Any) -> Iterator[tuple[str, str]]:
    """Yield what keeps functions from being run without trust, each with the function's name."""
    for function in functions:
        for problem in _problems(function.graph):
            yield function.name, problem
    try:
        turns.check(functions, module)
    except turns.Endless as error:
        yield error.function, str(error)


def _problems(block: Any) -> Iterator[str]:
    """Yield what may not run without trust, in a graph or block and all that are nested in it."""
    for node in block.nodes():
        kind = node.kind()
        if not _is_listed(kind):
            yield f"calls '{kind}', which is not known to compute and do nothing else"
        if kind == "prim::CallFunction" and next(node.inputs()).node().kind() != "prim::Constant":
            yield "calls a function that is made while it runs"
        if kind in ("prim::CallMethod", "prim::CreateObject"):
            yield from _foreign_class(node)
        for child in node.blocks():
            yield from _problems(child)


def _foreign_class(node: Any) -> Iterator[str]:
    """Yield the native class that an object is of, where its methods are not known."""
    owner = node.output().type() if node.kind() == "prim::CreateObject" else next(node.inputs()).type()
    name = owner.qualified_name() if hasattr(owner, "qualified_name") else str(owner)
    if name.startswith(_NATIVE) and not name.startswith(_CLASSES):
        yield f"uses the native class '{name}'"


def _is_listed(kind: str) -> bool:
    library, _, short = kind.partition("::")
    if library == "aten" and operators.is_listed(short):
        return True
    return short in _TABLES.get(library, frozenset())
