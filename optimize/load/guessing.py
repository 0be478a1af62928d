"""What a model takes, where nobody says it: read off its first layer, and tried."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parameter import is_lazy

#: Sides of square images, those that people train with first; a network that ends in a Linear runs with one alone.
_SIDES = (224, 32, 28, 64, 96, 128, 256, 299, 384, 512, 48, 112, 160, 192, 240, 260, 288, 300, 320, 380, 448, 640)
_LENGTHS = (128, 1024, 16_000)
_TOKENS = 128
_VIDEO = (16, 112, 112)
_RECURRENT = {"LSTM", "GRU", "RNN"}


def guess_inputs(
    module: torch.nn.Module, batch: int, sides: Sequence[int] = ()
) -> tuple[tuple[torch.Tensor, ...], str] | None:
    """Return an input ``[batch, *sizes]`` that a module of one input runs on, and what to say of it.

    Args:
        sides: Height and width of pictures, where somebody said them.

    Returns:
        Of the first usual sizes that its first layer takes and it runs on; None where there are none, or it wants
        several inputs.
    """
    if len(_required(module)) != 1:
        return None
    training = [part for part in module.modules() if getattr(part, "training", False)]  # frozen TorchScript lacks it
    module.eval()
    try:
        for example, shape in _usual(module, batch, sides):
            if _runs(module, example):
                return (example,), (
                    f"Nothing said what the model takes: {shape} was guessed from its first layer. If it was made for "
                    f"another size, give that: --input-shape {shape}."
                )
    finally:
        for part in training:
            part.training = True
    return None


def ask_for_shapes(module: torch.nn.Module) -> str:
    """Return the hint that asks for what several inputs take, or numbers of rows; empty of one input of floats."""
    names, is_of_rows = _required(module), any("Embedding" in _kinds(layer) for layer in module.modules())
    if not names or (len(names) == 1 and not is_of_rows):
        return ""
    shapes = ";".join(["16:int64" if is_of_rows else "16"] * len(names))
    return f'Give the sizes of one sample of {", ".join(names)}, such as --input-shape "{shapes}", or data.'


def arguments_of(module: torch.nn.Module) -> dict[str, bool]:
    """Return the arguments that its forward takes by their places, and whether it can do without each."""
    if isinstance(module, torch.jit.ScriptModule):
        arguments = module.forward.schema.arguments[1:]  # type: ignore[attr-defined]
        return {entry.name: entry.has_default_value() for entry in arguments}
    return {
        entry.name: entry.default is not entry.empty
        for entry in inspect.signature(module.forward).parameters.values()
        if entry.kind in (entry.POSITIONAL_ONLY, entry.POSITIONAL_OR_KEYWORD)
    }


def _required(module: torch.nn.Module) -> list[str]:
    return [name for name, is_optional in arguments_of(module).items() if not is_optional]


def _kinds(layer: torch.nn.Module) -> set[str]:
    """Return what a layer is called, and what it derives from."""
    return {getattr(layer, "original_name", "")} | {cls.__name__ for cls in type(layer).__mro__}


def _usual(module: torch.nn.Module, batch: int, sides: Sequence[int]) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield usual inputs of the first layer whose weight tells some, each as ``--input-shape`` says it."""
    generator = torch.Generator().manual_seed(0)
    for layer in module.modules():
        kinds = _kinds(layer)
        weight = getattr(layer, "weight_ih_l0" if kinds & _RECURRENT else "weight", None)
        if not isinstance(weight, torch.Tensor) or is_lazy(weight):
            continue
        shapes = _sizes(kinds, layer, weight)
        shapes = [(shapes[0][0], *sides)] if sides and "Conv2d" in kinds else shapes
        for shape in shapes:
            said = ",".join(map(str, shape))
            if "Embedding" in kinds:
                yield torch.zeros((batch, *shape), dtype=torch.int64), f"{said}:int64"
            else:
                yield torch.randn((batch, *shape), generator=generator).to(weight.dtype), said
        if shapes:
            return


def _sizes(kinds: set[str], layer: torch.nn.Module, weight: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the usual sizes of one sample for a layer; none of layers that tell nothing."""
    if "Conv2d" in kinds:
        channels = weight.shape[1] * int(getattr(layer, "groups", 1))
        return [(channels, side, side) for side in _SIDES]
    if "Conv1d" in kinds:
        return [(weight.shape[1], length) for length in _LENGTHS]
    if "Conv3d" in kinds:
        return [(weight.shape[1], *_VIDEO)]
    if "Linear" in kinds:
        return [(weight.shape[1],), (_TOKENS, weight.shape[1])]
    if "Embedding" in kinds:
        return [(_TOKENS,)]
    is_sequence = kinds & _RECURRENT and getattr(layer, "batch_first", False)
    return [(_TOKENS, weight.shape[1])] if is_sequence else []


def _runs(module: torch.nn.Module, example: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            module(example)
    except Exception:  # whatever a model says of sizes that it does not take
        return False
    return True
