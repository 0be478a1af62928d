"""Running a torch module on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from optimize.targets.arrays import to_array, to_tensor
from optimize.targets.base import Artifact, Runner


class TorchRunner(Runner):
    """Runs a loaded module in this process, without gradients.

    Args:
        artifact: What was loaded.
        module: Takes flat tensors; returns a tensor or a flat tuple of them.
        threads: Threads of torch's operators, for the whole process; None leaves them as they are.
    """

    shared = True

    def __init__(self, artifact: Artifact, module: Callable[..., Any], threads: int | None = None) -> None:
        super().__init__(artifact)
        self.module = module
        if threads is not None:
            torch.set_num_threads(threads)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays."""
        with torch.inference_mode():
            result = self.module(*map(to_tensor, inputs))
        outputs = (result,) if isinstance(result, torch.Tensor) else result
        return [to_array(output) for output in outputs]
