"""What an INT8 plan does to a program's answers, computed in float: the yardstick of passes that choose.

Every value that a runtime with integer kernels would store as integers is rounded to them, and so is every weight. The
rule is the common one of CPU runtimes: a layer reads integers, a convolution writes them; between convolutions
everything with an integer kernel stays integers; what else only float operators read (the residual sums of a
transformer, the logits of a linear layer) stays float. The deployed file remains the truth; this agrees with it to
about a decibel and takes no runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

import numpy as np
import torch
from torch import fx

from optimize import graph, ops
from optimize.distances import ratio_db
from optimize.graph import aten
from optimize.plan import Quantization
from optimize.program import Program, tensor_value
from optimize.quantization.grid import round_weight
from optimize.quantization.numerics import USUAL, Numerics, planned, scale_and_zero_point

#: Operators whose output runtimes store with the scale of their input.
MOVES = (*ops.PERMUTATIONS, aten.max_pool2d.default, aten.slice.Tensor)
#: Operators without weights that integer runtimes have kernels for.
BETWEEN = (
    *ops.CLIPS, *MOVES, aten.add.Tensor, aten.mul.Tensor, aten.cat.default, aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default, aten.mean.dim, aten.sigmoid.default, aten.hardsigmoid.default,
    aten.hardswish.default, aten.leaky_relu.default,
)  # fmt: skip


class Simulation(fx.Interpreter):
    """Runs a program as its static plan says, integers emulated in float.

    Args:
        program: The program; its weights may lie on the integer grid already.
        plan: A static plan, the program's own where None.
        numerics: Formats of activations and weights; the plan's ``bits`` narrow the weights'.
        weights: Round the weights too.
    """

    def __init__(
        self,
        program: Program,
        plan: Quantization | None = None,
        numerics: Numerics = USUAL,
        *,
        weights: bool = True,
    ) -> None:
        super().__init__(program.graph_module)
        plan = plan or program.plan
        stored = stored_values(program, plan.layers)
        self._steps = {
            node: (*scale_and_zero_point(plan.ranges[node.name], numerics.activation), *numerics.activation.bounds)
            for node in stored
            if node.name in plan.ranges
        }
        self._weights = {}
        for node in graph.calls(program.graph, *ops.WEIGHTED) if weights else ():
            weight = graph.constant(program.graph_module, graph.argument(node, "weight"))
            if node.name in plan.layers and weight is not None:
                form = planned(numerics.weight, plan, node.name)
                self._weights[node] = round_weight(weight, form, ops.output_axis(node))

    def run_node(self, n: fx.Node) -> object:
        """Run one node; its weight is rounded before, its result after."""
        if n in self._weights:
            arguments, keywords = self.fetch_args_kwargs_from_env(n)
            result = n.target(arguments[0], self._weights[n], *arguments[2:], **keywords)  # type: ignore[operator]
        else:
            result = super().run_node(n)
        step = self._steps.get(n)
        if step is None or not isinstance(result, torch.Tensor):
            return result
        return round_value(result, *step)

    def outputs(self, flat: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the flat outputs for flat inputs."""
        found: tuple[torch.Tensor, ...] = self.run(*flat, enable_io_processing=False)
        return found


def simulated_db(
    program: Program,
    batches: Iterable[Sequence[torch.Tensor]],
    plan: Quantization | None = None,
    *,
    reference: Program | Sequence[Sequence[torch.Tensor]] | None = None,
    numerics: Numerics = USUAL,
    weights: bool = True,
) -> float:
    """Return how close a quantized program answers to the float one: signal to noise of the outputs, dB.

    Args:
        program: The program, its weights as they will be quantized.
        batches: Flat inputs.
        plan: A static plan, the program's own where None.
        reference: The program in float, or its outputs batch by batch; ``program`` itself where its weights were not
            moved.
        numerics: Formats.
        weights: Round the weights too.
    """
    simulation = Simulation(program, plan, numerics, weights=weights)
    signal = noise = 0.0
    with torch.inference_mode():
        for number, batch in enumerate(batches):
            wanted = reference[number] if isinstance(reference, Sequence) else (reference or program).run(batch)
            for want, got in zip(wanted, simulation.outputs(batch), strict=True):
                if want.is_floating_point():
                    signal += float(want.double().square().sum())
                    noise += float((want.double() - got.double()).square().sum())
    return ratio_db(signal, noise)


def stored_values(program: Program, layers: Collection[str]) -> set[fx.Node]:
    """Return the nodes whose value is rounded to integers when the layers of these names run on integers."""
    reads, born, wanted = _trace(program, layers)
    written = born & reads.keys()  # a convolution has a kernel with integer output only
    stored = {*reads.values(), *(_folded_clip(node) or node for node in written), *(born & wanted)}
    return {node for node in stored if _folded_clip(node) is None}


def integer_values(program: Program, layers: Collection[str]) -> set[fx.Node]:
    """Return the nodes whose value integer kernels make: convolutions, and what follows without a float operator."""
    return _trace(program, layers)[1]


def _trace(program: Program, layers: Collection[str]) -> tuple[dict[fx.Node, fx.Node], set[fx.Node], set[fx.Node]]:
    """Return what each of these layers reads, and the values that are born and wanted as integers."""
    chosen = [node for node in graph.calls(program.graph, *ops.WEIGHTED) if node.name in layers]
    reads: dict[fx.Node, fx.Node] = {layer: graph.argument(layer, "input") for layer in chosen}

    def makes(node: fx.Node, born: Set[fx.Node]) -> bool:
        if node in reads:
            return not graph.is_call(node, aten.linear.default)
        return graph.is_call(node, *BETWEEN) and _is_fed(node, born)

    return reads, *trace_integers(program.graph, reads, makes, lambda user, born: user in born and user not in reads)


def round_value(value: torch.Tensor, scale: float, zero_point: int, low: int, high: int) -> torch.Tensor:
    """Round a value to integers from ``low`` to ``high`` and back, as ``torch.fake_quantize_per_tensor_affine``.

    Equal to it number for number, and four to twenty times as fast: torch's kernel goes through them one by one, and
    makes a mask for gradients that nobody asks for here.
    """
    inverse = float(np.float32(1) / np.float32(scale))
    return value.mul(inverse).round_().clamp_(low - zero_point, high - zero_point).mul_(scale)


def _is_fed(node: fx.Node, born: Set[fx.Node]) -> bool:
    """Say whether every activation a call reads is an integer already; weights and numbers are constants."""
    values = [source for source in node.all_input_nodes if tensor_value(source) is not None]
    sources = [source for source in values if source.op != "get_attr"]
    return bool(sources) and all(source in born for source in sources)


def _folded_clip(node: fx.Node) -> fx.Node | None:
    """Return the clip at zero behind a value with a scale of its own: integers are stored after it."""
    return ops.only_clip(node) if graph.is_call(node, *ops.WEIGHTED, aten.add.Tensor) else None


def trace_integers(
    nodes: fx.Graph,
    reads: Mapping[fx.Node, fx.Node],
    makes: Callable[[fx.Node, Set[fx.Node]], bool],
    passes: Callable[[fx.Node, Set[fx.Node]], bool],
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the values that are born as integers, and those that are wanted so, given what a runtime's kernels do.

    A value is *born* as integers where a kernel makes it so, and *wanted* as integers where an integer layer reads it,
    directly or through calls that take integers too. What is both stays integers and is never written in float.

    Args:
        reads: What each integer layer reads as integers; a padding that its weights have absorbed may lie between.
        makes: Says whether a value is made as integers, given those before it that are.
        passes: Says whether a call whose value is wanted takes integers, given all that are born so.
    """
    born: set[fx.Node] = set()
    for node in nodes.nodes:
        if makes(node, born):
            born.add(node)
    read, wanted = set(reads.values()), set[fx.Node]()
    for node in reversed(nodes.nodes):
        if node in read or any(user in wanted and passes(user, born) for user in node.users):
            wanted.add(node)
    return born, wanted
