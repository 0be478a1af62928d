"""The engine that integer kernels run on: the one of a fresh process, whatever this process was left with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: The best first. A process that imports torch begins with the first of them that the host has.
ENGINES = ("x86", "fbgemm", "onednn", "qnnpack")


@contextmanager
def fresh_engine() -> Iterator[None]:
    """Let torch's integer kernels be those of a fresh process.

    ``torch.ao.quantization`` examples set ``torch.backends.quantized.engine`` and leave it set; weights packed for
    another engine than the one that the file meets lose 3 dB on a ViT.
    """
    before = torch.backends.quantized.engine
    has = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = next((name for name in ENGINES if name in has), before)
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
