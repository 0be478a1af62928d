"""Quantization-aware training: the weights learn to live with the integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from optimize import named
from optimize.data import Given
from optimize.errors import Refused, UsageError
from optimize.passes.base import IntegerPass, Outcome
from optimize.passes.quantize_static import QuantizeStatic, choose_layers
from optimize.program import Program
from optimize.quantization.aware import QuantizedModule, Steps, clip_weights
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import watch
from optimize.quantization.numerics import USUAL
from optimize.registry import register_pass

#: With so few, least squared error clips most channels far below their largest weight, and training profits from that;
#: with one more it loses to weights rounded with the data in view.
_FEW_BITS = 3


@register_pass
@dataclass(frozen=True)
class QuantizeAware(IntegerPass):
    """Train the program with its INT8 rounding in the forward pass, then quantize it as ``QuantizeStatic`` does.

    The training loop is the user's: ``train(module)`` gets a module that takes and returns what the captured one did,
    and trains its ``parameters()`` in place with any data, loss and optimizer: float weights, which the forward pass
    rounds, and the steps of the integers they and the activations are rounded to. Afterwards the rounded weights and
    the ranges are written onto the program; every target places and exports them as it does after calibration.

    When it applies: as ``QuantizeStatic``. BatchNorm is what the passes before made of it (folded after ``FuseConvBN``,
    else with frozen statistics); there is no dropout in a captured program.

    What it costs: the calibration, and the training; a training step takes about twice that of the float module.

    Attributes:
        train: The training loop, or ``package.module:function`` in a recipe.
        calibration: As for ``QuantizeStatic``; where the steps start.
        steps: ``learned`` trains the steps too; ``frozen`` keeps the calibrated ones of activations, and lets those of
            weights follow the largest weight of each channel.
        bits: Integers of the weights, 2 to 8.

    Example:
        >>> import torch, optimize
        >>> def train(module):
        ...     optimizer = torch.optim.SGD(module.parameters(), 0.01)
        ...     module(torch.ones(4, 8)).square().mean().backward()
        ...     optimizer.step()
        >>> program = optimize.capture(torch.nn.Linear(8, 2).eval(), (torch.rand(2, 8),))
        >>> program, outcome = QuantizeAware(train, calibration=[torch.rand(16, 8)]).apply(program)
        >>> program.quantization.text()
        'static int8 of 1 layers, 2 ranges'

    Source: B. Jacob et al., 2017, arXiv 1712.05877; S. Esser et al., "Learned Step Size Quantization", 2019, arXiv
    1902.08153.
    """

    train: Callable[[Any], Any] | str = field(compare=False)
    calibration: Given = field(repr=False, compare=False)
    steps: Steps = "learned"
    bits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps not in get_args(Steps):
            raise UsageError(f"steps='{self.steps}': steps are 'learned' or 'frozen'.")
        if not callable(self.train) and not named.is_named(str(self.train)):
            raise UsageError(
                f"train={self.train!r}: the training loop is a function of the module to train.",
                hint="In a recipe, name it as package.module:function.",
            )
        self._calibrated()  # refuses calibration data that cannot be read twice, and bits that do not exist

    def rewrite(self, program: Program) -> Outcome:
        """Calibrate, train, and write what was learned onto the program.

        Raises:
            Refused: The training loop cannot be imported or raised, or it left weights that are not finite.
        """
        train = self.train if callable(self.train) else named.find(self.train)
        if program.quantization is None and self.bits <= _FEW_BITS:
            clip_weights(program, [layer.name for layer in choose_layers(program, self.kept(program))[0]], self.bits)
        outcome = self._calibrated().rewrite(program)
        if not outcome.rewrites:
            return outcome
        with torch.inference_mode(False), torch.enable_grad():
            module = QuantizedModule(program, self.steps)
            before = {name: value.detach().clone() for name, value in module.named_parameters()}
            self._run(train, module)
        moved = sum(not torch.equal(value, before[name]) for name, value in module.named_parameters())
        module.adopt(program)
        self._refresh_ranges(program, module)
        trained = tuple(replace(rewrite, what=f"trained as int{self.bits}") for rewrite in outcome.rewrites)
        note = f"Training moved {moved} of {len(before)} weights and steps."
        return replace(outcome, rewrites=trained, notes=(*outcome.notes, note))

    def _calibrated(self) -> QuantizeStatic:
        return QuantizeStatic(self.calibration, bits=self.bits, spare=0, keep=self.keep, cpu=self.cpu)

    def _refresh_ranges(self, program: Program, module: QuantizedModule) -> None:
        """Learn the ranges anew that training had no part in: some targets store those values as integers, too."""
        batches = FlatBatches(program, self.calibration)
        found = watch(program, batches).ranges("mse", USUAL.activation)
        program.quantization = replace(program.plan, ranges={**found, **module.ranges()})

    def _run(self, train: Callable[[Any], Any], module: QuantizedModule) -> None:
        try:
            train(module)
        except Exception as error:
            name = self.train if isinstance(self.train, str) else getattr(train, "__name__", "train")
            raise Refused(
                f"The training loop '{name}' raised {type(error).__name__}: {error}.",
                hint="It is called with the quantized module, which takes and returns what the captured one did.",
            ) from error
