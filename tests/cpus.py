"""What tests need of the processor that they run on."""

import shutil

import pytest

from optimize.processor import host

HAS_VNNI = host().level in ("vnni", "amx")
#: Files are the same everywhere; but without it torch and OpenVINO choose other kernels, some of which torch refuses.
NEEDS_VNNI = pytest.mark.skipif(not HAS_VNNI, reason="without VNNI the runtime chooses other kernels")
NEEDS_QEMU = pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
