"""Which operators compute in half by name alone: Apex's published lists, and ours for programs without data.

The tables hold Apex's own names (``apex/amp/lists/torch_overrides.py``, ``functional_overrides.py`` and
``tensor_overrides.py``); ``apex_name`` says which of them an ATen operator stands for. Batched products are on Apex's
half list from CUDA 9.1 on, so they are here.
"""

from __future__ import annotations

from collections.abc import Mapping

from optimize.plan import Policy

APEX_HALF = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "prelu",
    "linear", "addmm", "addmv", "addr", "matmul", "mm", "mv", "__matmul__", "addbmm", "baddbmm", "bmm",
})  # fmt: skip
APEX_FLOAT = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan",
    "pow", "__pow__", "__ipow__", "__rpow__", "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var",
    "renorm", "interpolate", "softplus", "softmin", "log_softmax", "softmax", "layer_norm", "group_norm",
    "local_response_norm", "normalize", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss", "nll_loss",
    "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss", "cpu",
})  # fmt: skip
#: In the widest type among their inputs; so is every operator on no list, because Apex leaves those alone.
APEX_WIDEST = frozenset({
    "addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul", "eq", "equal", "ge", "gt", "le",
    "lt", "ne", "cat", "stack",
})  # fmt: skip
APEX_BANNED = frozenset({"binary_cross_entropy"})

#: ATen operators under another name than the function that Apex patches.
_APEX_NAMES: Mapping[str, str] = {
    "_softmax": "softmax", "_log_softmax": "log_softmax", "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm", "linalg_vector_norm": "norm", "cross_entropy_loss": "cross_entropy",
    "var_mean": "var", "std_mean": "std", "upsample_nearest1d": "interpolate", "upsample_nearest2d": "interpolate",
    "upsample_nearest3d": "interpolate", "upsample_linear1d": "interpolate", "upsample_bilinear2d": "interpolate",
    "upsample_bicubic2d": "interpolate", "upsample_trilinear3d": "interpolate",
}  # fmt: skip

NORMS = frozenset({"batch_norm", "instance_norm"})
REDUCTIONS = frozenset({
    "sum", "mean", "prod", "cumsum", "cumprod", "logsumexp", "var", "std", "var_mean", "std_mean", "norm",
    "linalg_vector_norm", "dist",
})  # fmt: skip
#: Lose precision or overflow in half by what they compute: exponentials, logarithms, normalisations, long sums.
PRECISE = frozenset({
    "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "native_layer_norm", "group_norm", "rms_norm",
    "batch_norm", "instance_norm", "exp", "expm1", "log", "log10", "log2", "log1p", "pow", "rsqrt", "reciprocal", "sum",
    "prod", "cumsum", "cumprod", "var", "std", "norm", "linalg_vector_norm", "softplus", "erfinv", "acos", "asin",
    "cosh", "sinh", "tan", "upsample_bilinear2d", "upsample_bicubic2d", "arange",
})  # fmt: skip
#: Round their state at every step, which the emulation does not show: in float32 unless all is cast.
RECURRENT = frozenset({"lstm", "gru"})
#: What halves are for: matrix products and convolutions run several times as fast.
PRODUCTS = APEX_HALF - {"prelu", "__matmul__"} | {"scaled_dot_product_attention"}


def apex_name(op: str) -> str:
    """Return the name under which Apex lists an ATen operator.

    >>> apex_name("upsample_bilinear2d"), apex_name("conv2d")
    ('interpolate', 'conv2d')
    """
    return _APEX_NAMES.get(op, op)


def keeps_float32(policy: Policy, op: str) -> bool:
    """Say whether a level's table keeps an operator in float32 (``measured``: what it keeps without data)."""
    kept: Mapping[str, frozenset[str]] = {
        "measured": PRECISE | RECURRENT,
        "O1": APEX_FLOAT,
        "O2": NORMS | REDUCTIONS,
        "O3": frozenset(),
    }
    return policy == "O0" or (apex_name(op) if policy == "O1" else op) in kept[policy]
