"""Learn the range of every value of a program from calibration data, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from optimize.errors import Refused
from optimize.graph import origin
from optimize.program import Program, tensor_value
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.observers import Calibrator, Extrema, Histogram
from optimize.quantization.plan import Range

Batches = Iterable[Sequence[torch.Tensor]]


class _Observation(fx.Interpreter):
    """Runs the graph and shows every float value that is not a weight to a callback."""

    def __init__(self, module: fx.GraphModule, see: Callable[[fx.Node, torch.Tensor], None]) -> None:
        super().__init__(module)
        self.see = see

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if n.op in ("placeholder", "call_function") and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.see(n, result)
        return result


def learn_ranges(
    program: Program, batches: Batches, *, calibrator: Calibrator, form: TensorFormat
) -> tuple[dict[str, Range], int]:
    """Return the range of every float value by node name, and the number of samples seen.

    The data is read once for the extrema and, for ``mse``, once more for the histograms; nothing of it is kept.

    Args:
        program: A float program.
        batches: Re-iterable batches of flat inputs.
        calibrator: ``minmax`` keeps everything seen; ``mse`` clips where that lowers the mean squared error.
        form: The activation format that ``mse`` weighs clipping against rounding for.

    Raises:
        Refused: There is no data, or a value is not finite (the message names the layer).
    """
    extrema: dict[str, Extrema] = {}

    def see_extrema(node: fx.Node, value: torch.Tensor) -> None:
        try:
            extrema.setdefault(node.name, Extrema()).update(value)
        except Refused as error:
            raise Refused(
                f"Calibration met a value that is not finite at '{origin(node)}' ({node.name}).",
                hint="Look for NaN or infinity in the calibration data, or for an overflow in the model.",
            ) from error

    samples = observe(program, batches, see_extrema)
    if samples == 0:
        raise Refused("The calibration data is empty.", hint="Give at least one batch; 100 to 500 samples are usual.")
    if calibrator == "minmax":
        return {name: seen.range() for name, seen in extrema.items()}, samples
    histograms = {name: Histogram(seen) for name, seen in extrema.items()}
    observe(program, batches, lambda node, value: histograms[node.name].update(value))
    return {name: histogram.least_squares_range(form) for name, histogram in histograms.items()}, samples


def observe(program: Program, batches: Batches, see: Callable[[fx.Node, torch.Tensor], None]) -> int:
    """Run the program over the data and show every float value to ``see``; return the number of samples."""
    observation = _Observation(program.graph_module, see)
    samples = 0
    with torch.inference_mode():
        for batch in batches:
            flat = program.flatten(tuple(batch))
            observation.run(*flat, enable_io_processing=False)
            samples += int(flat[0].shape[0]) if flat and flat[0].dim() else 1
    return samples


def is_float_value(node: fx.Node) -> bool:
    """Say whether a node carries one floating-point tensor."""
    value = tensor_value(node)
    return value is not None and value.is_floating_point()
