"""The passes, one idea a file. Importing this package registers them all."""

from optimize.passes.cast_half import CastBF16, CastFP16
from optimize.passes.fuse_bn_sign import FuseBNSign
from optimize.passes.fuse_conv_bn import FuseConvBN
from optimize.passes.prune_channels import PruneChannels
from optimize.passes.prune_weights import PruneWeights
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.passes.quantize_static import QuantizeStatic
from optimize.passes.reparameterize import Reparameterize
from optimize.passes.script import Script

__all__ = [
    "CastBF16",
    "CastFP16",
    "FuseBNSign",
    "FuseConvBN",
    "PruneChannels",
    "PruneWeights",
    "QuantizeDynamic",
    "QuantizeStatic",
    "Reparameterize",
    "Script",
]
