"""Put what makes a model's input of the pixels of a picture into the graph, which then takes the picture itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from optimize import graph
from optimize.data.preprocessing import ImagePreprocessing
from optimize.graph import aten
from optimize.passes.base import Outcome, Pass, Rewrite, Skip, Stage
from optimize.passes.fuse_conv_bn import fold_before
from optimize.program import Program
from optimize.registry import register_pass
from optimize.wording import plural


@register_pass
@dataclass(frozen=True)
class IncludePreprocess(Pass):
    """Take pictures as decoders give them, uint8 ``[N, H, W, C]`` in RGB, and prepare them in the graph.

    The input ``x`` ``[N, C, H, W]`` becomes pixels ``p`` ``[N, H, W, C]`` of 0 to 255, and the graph begins with
    ``x = (p - 255 mean) / (255 std)``: a cast, a permute, a reversal of the channels for ``order="bgr"``, a difference
    and a product a channel. The product is folded into the first layer where that alone reads it, and the difference
    too where the layer pads with nothing (the patches of a transformer): a shift changes what zeros at a border mean.
    Decoding, resizing and cutting stay outside: runtimes resize without, or with another, antialiasing than Pillow.

    When it applies: to a program whose one input is floating point ``[N, C, H, W]`` of 1 or 3 channels and a known
    height and width, with one number or as many in ``mean`` and ``std``.

    What it costs: a pass over the pixels, less than what does the same outside; a quarter of the bytes are handed over.

    Attributes:
        mean: One number for all channels or one for each, in [0, 1], in the order that the model takes them in.
        std: Likewise.
        order: Of the channels that the model takes: ``rgb`` or ``bgr``. Pictures are given in RGB.

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Conv2d(3, 8, 3).eval()
        >>> program = optimize.capture(net, (torch.zeros(2, 3, 8, 8),))
        >>> program, outcome = IncludePreprocess((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)).apply(program)
        >>> program
        Program(input_1 uint8[batch, 8, 8, 3] -> output_0; 4 calls, float32)
        >>> program(torch.full((1, 8, 8, 3), 128, dtype=torch.uint8)).shape
        torch.Size([1, 8, 6, 6])
    """

    stage: ClassVar[Stage] = Stage.INPUT

    mean: tuple[float, ...]
    std: tuple[float, ...]
    order: str = "rgb"

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UsageError: They are none that pictures have.
        """
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        _ = self.words  # refuses the others

    @property
    def words(self) -> ImagePreprocessing:
        """What it does, as ``--preprocess`` says it."""
        return ImagePreprocessing(mean=self.mean, std=self.std, order=self.order)

    @property
    def included(self) -> str:
        """The words of ``--preprocess`` that need not be followed outside any more."""
        return self.words.inside

    def pair(self, inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return inputs prepared outside, and the pictures they are prepared from, which are nearest to those given."""
        pictures = [self.words.pixels(value) for value in inputs]
        return [self.words.normalized(picture).to(inputs[0].dtype) for picture in pictures], pictures

    def rewrite(self, program: Program) -> Outcome:
        """Write the preparation in front, and fold what folds."""
        if reason := self._misfit(program):
            return Outcome(skips=(Skip(", ".join(program.input_names), "input", reason),))
        module, (node,) = program.graph_module, program.graph.find_nodes(op="placeholder")
        readers, dtype = list(node.users), program.inputs[0].dtype
        node.meta["val"] = node.meta["val"].permute(0, 2, 3, 1).to(torch.uint8)
        program.inputs = tuple(self.pair(program.inputs)[1])
        numbers = (torch.tensor(each, dtype=torch.float64).reshape(-1, 1, 1) * 255 for each in (self.mean, self.std))
        mean, std = (each.expand(program.inputs[0].shape[3], 1, 1) for each in numbers)
        with module.graph.inserting_before(node.next):
            value = _call(module, aten._to_copy.default, node, dtype=dtype)
            value = _call(module, aten.permute.default, value, [0, 3, 1, 2])
            if self.order == "bgr":
                value = _call(module, aten.flip.default, value, [1])
            # What follows was captured on these strides: on others, reshape is taken apart as a gather.
            value = _call(module, aten.clone.default, value, memory_format=torch.contiguous_format)
            moved = _call(module, aten.sub.Tensor, value, _numbers(module, "mean", mean.to(dtype)))
            prepared = _call(module, aten.mul.Tensor, moved, _numbers(module, "scale", (1 / std).to(dtype)))
        for reader in readers:
            reader.replace_input_with(node, prepared)
        program.refresh()
        done = [Rewrite(node.name, f"uint8 [N, H, W, C] in RGB, with {self.included}, from [N, C, H, W]")]
        return Outcome((*done, *fold_before(module, [moved, prepared])))

    def _misfit(self, program: Program) -> str:
        """Return why a program cannot take pictures so; empty where it can."""
        if len(program.inputs) != 1:
            return f"the model takes {len(program.inputs)} inputs, not one picture"
        value, dims = program.inputs[0], program.dynamic[0]
        if not value.is_floating_point():
            return f"the model takes {str(value.dtype).removeprefix('torch.')} already"
        if value.dim() != 4 or value.shape[1] not in (1, 3):
            return f"the model takes {list(value.shape)}, and pictures are [N, C, H, W] with 1 or 3 channels"
        if not self.words.fits(value.shape[1]):
            channels, counted = plural(value.shape[1], "channel"), max(len(self.mean), len(self.std))
            return f"the model takes {channels}, and there are numbers for {counted} (mean, std)"
        return "its height and width are free, which pictures must have" if dims.keys() - {0} else ""


def _call(module: fx.GraphModule, target: Callable[..., Any], *arguments: Any, **keywords: Any) -> fx.Node:
    call = module.graph.call_function(target, arguments, keywords)
    graph.normalize_arguments(call)
    return call


def _numbers(module: fx.GraphModule, name: str, numbers: torch.Tensor) -> fx.Node:
    return module.graph.get_attr(graph.store(module, f"pixels.{name}", numbers))
