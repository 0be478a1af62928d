"""Run the user's own torch module in a worker: in Python as it stands, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from optimize.errors import TargetUnavailable
from optimize.load import ModelSource, load_confined, load_trusted
from optimize.targets.arrays import to_array
from optimize.targets.base import Artifact
from optimize.targets.torch_runner import TorchRunner


class ModuleRunner(TorchRunner):
    """Calls a module that may return any structure, and always says what it runs on."""

    def __init__(self, artifact: Artifact, module: Callable[..., Any], device: str) -> None:
        super().__init__(artifact, module, device=device)
        self.providers = self.providers or (device,)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays."""
        with torch.inference_mode():
            leaves = pytree.tree_leaves(self.module(*self._tensors(inputs)))
        return [to_array(leaf) for leaf in leaves]


def open_module(artifact: Artifact, loading: Mapping[str, Any], threads: int) -> ModuleRunner:
    """Load a module, a state dict with its factory, TorchScript or a factory by the rules of ``optimize.load``.

    Args:
        artifact: What it takes.
        loading: ``source``, ``device``, and ``factory`` where there is one.
        threads: Torch's threads, for the whole process.

    Raises:
        TargetUnavailable: There is no such device here.
        OptimizeError: It cannot be loaded.
    """
    device = loading["device"]
    if device == "cuda" and not torch.cuda.is_available():
        raise TargetUnavailable("Torch finds no GPU on this machine.", hint="Leave out --device cuda.")
    torch.set_num_threads(threads)
    source = ModelSource.of(loading["source"], model=loading.get("factory"))
    module = (load_confined(source) if artifact.untrusted else load_trusted(source)).module
    return ModuleRunner(artifact, module.eval().to(device), device)
