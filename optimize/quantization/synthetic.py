"""Calibration without data: inputs whose BatchNorm inputs have the statistics the network was trained with.

Source: Y. Cai et al., "ZeroQ: A Novel Zero Shot Quantization Framework", 2020, arXiv 2001.00281, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from optimize import graph
from optimize.data import Batch, Samples
from optimize.errors import Refused
from optimize.graph import aten
from optimize.program import Program
from optimize.progress import Progress, silent

_LEARNING_RATE = 0.1


def synthesize(
    program: Program, *, samples: int = 16, steps: int = 60, seed: int = 0, progress: Progress = silent
) -> Samples:
    """Return inputs that reproduce the running statistics of every BatchNorm, found by gradient descent from noise.

    Run it on the captured program, before BatchNorms are folded away. A program without BatchNorm gets normal noise.

    Args:
        program: A float program.
        samples: Inputs to make.
        steps: Descent steps (Adam).
        seed: Seed of the noise.
        progress: Told how many of the steps are done.

    Raises:
        Refused: There is no input, or one is not floating point: no noise stands for tokens.
    """
    if not program.inputs:
        raise Refused("The model takes no inputs: it gives one answer, and INT8 has nothing to be calibrated on.")
    generator = torch.Generator().manual_seed(seed)
    inputs = [_noise(program, tensor, samples, generator) for tensor in program.sample(samples)]
    norms = [node for node in graph.calls(program.graph, aten.batch_norm.default) if _has_statistics(node)]
    if not norms:
        return _made(inputs, "normal noise (the model has no BatchNorm statistics)")
    for tensor in inputs:
        tensor.requires_grad_(True)
    optimizer = torch.optim.Adam(inputs, lr=_LEARNING_RATE)
    matching = _StatisticsMatching(program.graph_module, set(norms))
    for step in range(steps):
        optimizer.zero_grad()
        with torch.enable_grad():
            matching.loss(inputs).backward()
        optimizer.step()
        progress("synthesise calibration data", (step + 1) / steps)
    return _made([tensor.detach() for tensor in inputs], "synthesised from BatchNorm statistics")


def _made(inputs: Sequence[torch.Tensor], name: str) -> Samples:
    batch = Batch(tuple(inputs))
    return Samples(name, lambda: iter((batch,)), len(batch), synthetic=True)


def _noise(program: Program, example: torch.Tensor, samples: int, generator: torch.Generator) -> torch.Tensor:
    if not example.is_floating_point():
        raise Refused(
            f"No calibration data can be synthesised: the model takes {example.dtype}, not floating point.",
            hint="Give real inputs with --calib.",
        )
    return torch.randn(example.shape, generator=generator, dtype=example.dtype)


def _has_statistics(norm: fx.Node) -> bool:
    return not graph.argument(norm, "training") and graph.argument(norm, "running_mean") is not None


class _StatisticsMatching(fx.Interpreter):
    """Runs the graph and sums how far the input of each BatchNorm is from its running mean and deviation."""

    def __init__(self, module: fx.GraphModule, norms: set[fx.Node]) -> None:
        super().__init__(module)
        self.norms = norms
        self.total = torch.zeros(())

    def loss(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        self.total = torch.zeros(())
        self.run(*inputs, enable_io_processing=False)
        return self.total

    def run_node(self, n: fx.Node) -> object:
        if n in self.norms:
            (x, _, _, mean, var, *_), _ = self.fetch_args_kwargs_from_env(n)
            axes = [axis for axis in range(x.dim()) if axis != 1]
            spread = var.sqrt()
            spread = spread.clamp_min(0.1 * float(spread.mean()) + 1e-6)  # a dead channel must not outweigh the others
            off_mean, off_spread = (x.mean(axes) - mean) / spread, (x.std(axes) - var.sqrt()) / spread
            self.total = self.total + _huber(off_mean) + _huber(off_spread)
        return super().run_node(n)


def _huber(error: torch.Tensor) -> torch.Tensor:
    """Square near 0, linear far off: a few channels far off must not steer alone."""
    return torch.nn.functional.smooth_l1_loss(error, torch.zeros_like(error))
