"""The passes, one idea a file. Importing this package registers them all."""

from optimize.passes.absorb_bias import AbsorbBias as AbsorbBias
from optimize.passes.cast_half import CastBF16 as CastBF16
from optimize.passes.cast_half import CastFP16 as CastFP16
from optimize.passes.equalize_channels import EqualizeChannels as EqualizeChannels
from optimize.passes.fuse_bn_sign import FuseBNSign as FuseBNSign
from optimize.passes.fuse_conv_bn import FuseConvBN as FuseConvBN
from optimize.passes.include_preprocessing import IncludePreprocess as IncludePreprocess
from optimize.passes.pair_channels import PairChannels as PairChannels
from optimize.passes.prune_channels import PruneChannels as PruneChannels
from optimize.passes.prune_weights import PruneWeights as PruneWeights
from optimize.passes.quantize_aware import QuantizeAware as QuantizeAware
from optimize.passes.quantize_dynamic import QuantizeDynamic as QuantizeDynamic
from optimize.passes.quantize_static import QuantizeStatic as QuantizeStatic
from optimize.passes.quantize_weights import QuantizeWeights as QuantizeWeights
from optimize.passes.reduce_depth import ReduceDepth as ReduceDepth
from optimize.passes.reparameterize import Reparameterize as Reparameterize
from optimize.passes.script import Script as Script
from optimize.passes.select_early import SelectEarly as SelectEarly
from optimize.passes.smooth_activations import SmoothActivations as SmoothActivations
