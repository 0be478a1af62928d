"""What tests need of the processor that they run on."""

import pytest

from optimize.processor import host

HAS_VNNI = host().has_avx512_vnni
#: Simulation and compensated rounding are for weights of 8 bits; files made where 16-bit sums overflow have 7. Without
#: it some of torch's kernels answer wrongly, too, and are refused when a file is made, and OpenVINO chooses others.
NEEDS_VNNI = pytest.mark.skipif(not HAS_VNNI, reason="files made on this CPU have weights of 7 bits (no AVX512-VNNI)")
