"""Quantization-aware training: the weights learn to live with the integers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import fx

from optimize import graph, named, ops
from optimize.data import Given
from optimize.errors import UsageError, blaming, nearest
from optimize.passes.base import IntegerPass, Outcome, calls_within
from optimize.passes.fuse_conv_bn import fold_norms, norms_behind
from optimize.passes.quantize_static import QuantizeStatic, choose_layers
from optimize.program import Program
from optimize.quantization.aware import QuantizedModule, Scheme, Steps, clip_weights, insert_signs, scale_axis
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import watch
from optimize.quantization.numerics import USUAL
from optimize.quantization.quantizers import QUANTIZERS, Quantizer, QuantizerRule, TanhWeights
from optimize.registry import register_pass

#: With so few, least squared error clips most channels far below their largest weight, and training profits from that;
#: with one more it loses to weights rounded with the data in view.
_FEW_BITS = 3
#: Samples that BatchNorm sees at once when its statistics are taken anew, and input values where those are more samples
#: (networks of two bits are that sensitive: of 64 digits at once one was right on 63 %, of 512 on 87, of 2,000 on 96);
#: samples in all, at most, and from how many on: of 256, they were worse than running ones.
_TOGETHER, _VALUES, _MOST, _ENOUGH = 128, 2**21, 4096, 1024


@register_pass
@dataclass(frozen=True)
class QuantizeAware(IntegerPass):
    """Train the program with its rounding in the forward pass, then quantize it as ``QuantizeStatic`` does.

    The training loop is the user's: ``train(module)`` gets a module that takes and returns what the captured one did,
    and trains its ``parameters()`` in place with any data, loss and optimizer: float weights, which the forward pass
    rounds, and the steps of the integers they and the activations are rounded to. Afterwards the rounded weights and
    the ranges are written onto the program; every target places and exports them as it does after calibration.

    =============  ===============================================  ============================================
    ``quantizer``  weights                                          what layers read
    =============  ===============================================  ============================================
    ``iao``        the largest of a channel is the largest integer  running mean of the ranges
    ``lsq``        learned steps, a channel                         learned step
    ``lsq+``       as ``lsq``                                       learned step and offset
    ``pact``       as ``dorefa``                                    learned clip
    ``dorefa``     ``tanh(w) / max``, of a layer                    clipped to 0 and 1
    ``wrpn``       clipped to -1 and 1                              as ``dorefa``
    ``twn``        ``-a, 0, a``                                     as ``lsq``; signs with ``activation_bits=1``
    ``bwn``        ``-a, a``                                        as ``lsq``; signs with ``activation_bits=1``
    ``xnor``       as ``bwn``                                       signs
    ``bnn``        ``-1, 1``                                        signs
    =============  ===============================================  ============================================

    What layers read in fewer than 8 bits is stored in 8 and clamped in the graph, and ternary and binary weights are
    integers of 2 bits: every runtime computes them exactly with its INT8 kernels. Signs take the place of the ReLU
    before a layer. ``dorefa``, ``pact``, ``wrpn`` and ``bnn`` change how large weights are, which the BatchNorm behind
    makes up for: use them where there is one.

    When it applies: as ``QuantizeStatic``. BatchNorm learns, on the statistics of the batch while the module is in
    training mode; that directly behind a layer is folded into it afterwards, so do not fold it before. Running
    statistics are those of the last batches, with few bits points away: give 1,024 samples of calibration data or more,
    and they are taken anew on them after training. There is no dropout in a captured program.

    What it costs: the calibration, and the training; a training step takes about twice that of the float module.

    Attributes:
        train: The training loop, or ``package.module:function`` in a recipe.
        calibration: As for ``QuantizeStatic``; where the steps start, and what statistics are taken anew on.
        quantizer: A name of the table.
        steps: ``learned`` trains the steps too; ``frozen`` keeps the activations' where they begin, lets those of
            ``lsq`` weights follow the largest of each channel, and keeps the statistics of BatchNorm.
        bits: Bits of the weights, 2 to 8 (1 to 8 with ``dorefa`` and ``pact``); None for 8, or what the name says.
        activation_bits: Bits of what layers read, 1 to 8; None for 8, or what the name says.
        by_layer: Bits of weights and of what is read, ``{"blocks.0": (2, 4)}``, of the layers in modules by path or
            pattern, the last that fits; where several layers read one value, it has the most bits of theirs.
        through: Bits that weights and what is read are trained with before, the most first, such as ``(8, 4)``: each
            training begins with the weights of the one before it.
        gradient_bits: Bits of the gradients that come back to a layer, 2 to 8, with noise that keeps their mean
            (``dorefa``); 0 leaves them.
        ends: Bits of the first and the last layers, and what they read: 8, or 0 for those of the others. Where a
            network has no other layers, all have ``bits``.

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

    Source: ``iao`` B. Jacob et al., 2017, arXiv 1712.05877; ``lsq`` S. Esser et al., 2019, arXiv 1902.08153; ``lsq+``
    Y. Bhalgat et al., 2020, arXiv 2004.09576; ``pact`` J. Choi et al., 2018, arXiv 1805.06085; ``dorefa`` S. Zhou
    et al., 2016, arXiv 1606.06160; ``wrpn`` A. Mishra et al., 2017, arXiv 1709.01134; ``twn`` F. Li et al., 2016,
    arXiv 1605.04711; ``bwn``, ``xnor`` M. Rastegari et al., 2016, arXiv 1603.05279; ``bnn`` I. Hubara et al., 2016,
    arXiv 1602.02830.
    """

    train: Callable[[Any], Any] | str = field(compare=False)
    calibration: Given = field(repr=False, compare=False)
    steps: Steps = "learned"
    bits: int | None = None
    quantizer: Quantizer = "lsq"
    activation_bits: int | None = None
    gradient_bits: int = 0
    ends: int = 8
    by_layer: Mapping[str, Sequence[int]] = field(default_factory=dict)
    through: Sequence[int] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps not in get_args(Steps):
            raise UsageError(f"steps='{self.steps}': steps are 'learned' or 'frozen'.")
        if self.quantizer not in QUANTIZERS:
            hint = nearest(str(self.quantizer), QUANTIZERS)
            raise UsageError(
                f"There is no quantizer '{self.quantizer}'.", hint=hint or f"One of {', '.join(QUANTIZERS)}."
            )
        if not callable(self.train) and not named.is_named(str(self.train)):
            raise UsageError(
                f"train={self.train!r}: the training loop is a function of the module to train.",
                hint="In a recipe, name it as package.module:function.",
            )
        self._check_bits()
        self._calibrated()  # refuses calibration data that cannot be read twice

    def _check_bits(self) -> None:
        rule = self._rule
        if rule.fixed and (self._bits != rule.bits or self.by_layer or self.through):
            raise UsageError(
                f"bits={self.bits}: the weights of '{self.quantizer}' have {rule.bits}.",
                hint="Leave bits, by_layer and through out.",
            )
        self._check_pair("bits", "activation_bits", self._bits, self._activation_bits)
        for word, pair in self.by_layer.items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise UsageError(f"by_layer '{word}': {pair!r} is no pair of bits, such as (4, 8).")
            self._check_pair(f"by_layer '{word}': weights", f"by_layer '{word}': what is read", *pair)
        if list(self.through) != sorted({*self.through} & {*range(self._bits + 1, 9)}, reverse=True):
            raise UsageError(f"through={self.through}: bits above {self._bits} and up to 8, the most first.")
        if self.gradient_bits not in (0, *range(2, 9)):
            raise UsageError(f"gradient_bits={self.gradient_bits}: gradients have 2 to 8 bits, or 0 for all of them.")
        if self.ends not in (0, 8):
            raise UsageError(
                f"ends={self.ends}: the first and the last layers have 8 bits, or 0 for those of the others."
            )

    def _check_pair(self, of_weights: str, of_read: str, bits: int, activation_bits: int) -> None:
        least = 1 if issubclass(self._rule.weights, TanhWeights) else 2
        if not self._rule.fixed and bits not in range(least, 9):
            raise UsageError(f"{of_weights}={bits}: weights have {least} to 8 bits with '{self.quantizer}'.")
        if activation_bits not in (range(1, 9) if self._rule.reads else (1,)):
            range_of = "1 to 8 bits" if self._rule.reads else f"signs with '{self.quantizer}', of 1 bit"
            raise UsageError(f"{of_read}={activation_bits}: layers read {range_of}.")

    def rewrite(self, program: Program) -> Outcome:
        """Calibrate, train, and write what was learned onto the program.

        Raises:
            Refused: The training loop cannot be imported or raised, or it left weights that are not finite.
        """
        for bits in self.through:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Nothing is trained")  # where it was cut off later, which goes on
                module, _ = self._widened(bits)._train(program.clone())
            if module is not None:
                program.graph_module.load_state_dict(module.body.state_dict())
        module, outcome = self._train(program)
        if module is not None:
            module.adopt(program)
            fold_norms(program.graph_module, module.scheme.norms)
            program.refresh()
            self._refresh_ranges(program, module)
        return outcome

    def _widened(self, bits: int) -> QuantizeAware:
        """Return this pass with no fewer bits anywhere than these."""
        pairs = {word: [max(bits, own) for own in pair] for word, pair in self.by_layer.items()}
        return replace(self, bits=bits, activation_bits=max(bits, self._activation_bits), by_layer=pairs, through=())

    def _train(self, program: Program) -> tuple[QuantizedModule | None, Outcome]:
        """Return a trained module of a program, whose signs and clipped weights are in place, and what to say of it."""
        train = self.train if callable(self.train) else named.find(self.train)
        layers = [layer.name for layer in choose_layers(program, self.kept(program))[0]]
        scheme, whole = self._scheme(program, layers), program
        is_whole = len(scheme.layers) == 0 and not scheme.norms
        if program.quantization is None and is_whole and self._bits <= _FEW_BITS:
            clip_weights(program, layers, self._bits)
        if not is_whole:
            whole = program.clone()
            fold_norms(whole.graph_module, scheme.norms)
            whole.refresh()
        outcome = self._calibrated(scheme).rewrite(whole)
        if not outcome.rewrites:
            return None, outcome
        with torch.inference_mode(False), torch.enable_grad():
            module = QuantizedModule(program, self.steps, replace(scheme, folded=whole))
            self._begin(module, program)
            before = {name: value.detach().clone() for name, value in module.named_parameters()}
            self._run(train, module)
            settled = self._settle(module, program)
        moved = sum(not torch.equal(value, before[name]) for name, value in module.named_parameters())
        trained = tuple(replace(rewrite, what=f"trained as int{self._bits}") for rewrite in outcome.rewrites)
        notes = [f"Training moved {moved} of {len(before)} weights and steps."]
        if settled:
            notes.append(f"The statistics of BatchNorm were taken anew on {settled:,} calibration samples.")
        return module, replace(outcome, rewrites=trained, notes=(*outcome.notes, *notes))

    @property
    def _rule(self) -> QuantizerRule:
        return QUANTIZERS[self.quantizer]

    @property
    def _bits(self) -> int:
        return self._rule.bits if self.bits is None else self.bits

    @property
    def _activation_bits(self) -> int:
        return self._rule.activation_bits if self.activation_bits is None else self.activation_bits

    def _scheme(self, program: Program, layers: Collection[str]) -> Scheme:
        """Return how the layers are to be quantized, with the signs that some read in place."""
        said = calls_within(program, self.by_layer, "by_layer")
        pairs = {node.name: self.by_layer[word] for word, nodes in said.items() for node in nodes}
        by_layer = {name: (pair[0], pair[1]) for name, pair in pairs.items() if name in layers}
        learns_all = self.quantizer == "lsq" and self._activation_bits == 8 and not self.gradient_bits and not by_layer
        inner = self._inner(program, layers) | by_layer.keys()
        behind = norms_behind(program.graph_module, set(layers))
        # Layers with one step for all channels, which the scales of a BatchNorm would tear apart.
        sharing = {layer.name for layer in graph.calls(program.graph, *ops.WEIGHTED) if scale_axis(layer) is None}
        norms = {norm: layer for norm, layer in behind.items() if layer not in sharing}
        is_uniform = self._bits == 8 or (inner == set(layers) and not norms)
        scheme = Scheme(
            quantizer=self.quantizer,
            layers=frozenset() if learns_all and is_uniform else inner,
            bits=self._bits,
            activation_bits=self._activation_bits,
            gradient_bits=self.gradient_bits,
            by_layer=by_layer,
            norms=norms,
        )
        reads_signs = self._activation_bits == 1 and self._rule.fixed
        return replace(scheme, signs=insert_signs(program, scheme.layers)) if reads_signs else scheme

    def _inner(self, program: Program, layers: Collection[str]) -> frozenset[str]:
        """Return the layers that are neither first nor last; all where there is none."""
        return frozenset(layers) - (_at_ends(program, layers) if self.ends else set()) or frozenset(layers)

    def _calibrated(self, scheme: Scheme | None = None) -> QuantizeStatic:
        bits = 8 if scheme is None or scheme.layers else self._bits
        return QuantizeStatic(self.calibration, bits=bits, alike=True, spare=0, keep=self.keep, cpu=self.cpu)

    def _begin(self, module: QuantizedModule, program: Program) -> None:
        """Show the quantizers of what layers read one batch, from which they begin."""
        if module.readings:
            with torch.no_grad():
                module.run(next(iter(FlatBatches(program, self.calibration))))

    def _settle(self, module: QuantizedModule, program: Program) -> int:
        """Take the statistics of BatchNorm anew where there are samples enough; return of how many, 0 without."""
        module.eval()
        if not module.keeps_statistics:
            return 0
        batches = FlatBatches(program, self.calibration).mixed(_TOGETHER, _MOST, _VALUES)
        if (samples := sum(len(flat[0]) for flat in batches)) < _ENOUGH:
            return 0
        module.take_statistics(batches)
        return samples

    def _refresh_ranges(self, program: Program, module: QuantizedModule) -> None:
        """Learn the ranges anew that training had no part in: some targets store those values as integers, too."""
        observed = watch(program, FlatBatches(program, self.calibration))
        module.clamp_clipped(program, observed.values)
        found = observed.ranges("mse", USUAL.activation)
        program.quantization = replace(program.plan, ranges={**found, **module.ranges()})

    def _run(self, train: Callable[[Any], Any], module: QuantizedModule) -> None:
        name = self.train if isinstance(self.train, str) else getattr(train, "__name__", "train")
        hint = "It is called with the quantized module, which takes and returns what the captured one did."
        with blaming(f"The training loop '{name}'", hint):
            train(module)


def _at_ends(program: Program, layers: Collection[str]) -> set[str]:
    """Return the layers that are the first of a way from an input, or the last of one to an output."""
    found, begun, ending = set[str](), set[fx.Node](), set[fx.Node]()
    for node in program.graph.nodes:
        if node.op == "placeholder" or any(source in begun for source in node.all_input_nodes):
            if node.name in layers:
                found.add(node.name)
            else:
                begun.add(node)
    for node in reversed(program.graph.nodes):
        if node.op == "output" or any(user in ending for user in node.users):
            if node.name in layers:
                found.add(node.name)
            else:
                ending.add(node)
    return found
