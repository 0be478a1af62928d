"""When, where and with what a table was measured: one line above it, so that no figure goes without them."""

from __future__ import annotations

from datetime import date

from optimize.measure import environment
from optimize.targets.packaging import versions_of

#: Packages whose own names for themselves are other ones than their distributions.
_TITLES = {
    "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "nncf": "NNCF", "tensorrt-rtx": "TensorRT-RTX",
    "optuna": "Optuna",
}  # fmt: skip


def conditions(*packages: str) -> str:
    """Return the day, the processor with its instruction sets, GPUs, and versions: torch's and those of some packages.

    Args:
        packages: Distributions; one that is not installed here is not named.
    """
    here = environment.current()
    versions = versions_of("torch", *packages)
    words = [f"{_TITLES.get(name, name)} {version}" for name, version in versions.items()]
    sets = f" with {' '.join(here.cpu_flags)}" if here.cpu_flags else ""
    return f"{date.today()}, {', '.join([f'{here.cpu or here.system}{sets}', *here.gpus])}; {', '.join(words)}."
