"""The passes, one idea a file. Importing this package registers them all."""

from optimize.passes.absorb_bias import AbsorbBias
from optimize.passes.cast_half import CastBF16, CastFP16
from optimize.passes.equalize_channels import EqualizeChannels
from optimize.passes.fuse_bn_sign import FuseBNSign
from optimize.passes.fuse_conv_bn import FuseConvBN
from optimize.passes.include_preprocessing import IncludePreprocess
from optimize.passes.pair_channels import PairChannels
from optimize.passes.prune_channels import PruneChannels
from optimize.passes.prune_weights import PruneWeights
from optimize.passes.quantize_aware import QuantizeAware
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.passes.quantize_static import QuantizeStatic
from optimize.passes.quantize_weights import QuantizeWeights
from optimize.passes.reduce_depth import ReduceDepth
from optimize.passes.reparameterize import Reparameterize
from optimize.passes.script import Script
from optimize.passes.smooth_activations import SmoothActivations

__all__ = [
    "AbsorbBias",
    "CastBF16",
    "CastFP16",
    "EqualizeChannels",
    "FuseBNSign",
    "FuseConvBN",
    "IncludePreprocess",
    "PairChannels",
    "PruneChannels",
    "PruneWeights",
    "QuantizeAware",
    "QuantizeDynamic",
    "QuantizeStatic",
    "QuantizeWeights",
    "ReduceDepth",
    "Reparameterize",
    "Script",
    "SmoothActivations",
]
