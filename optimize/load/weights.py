"""State dicts: found in a checkpoint and fitted to the module that a factory makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from optimize import named
from optimize.errors import Refused, first_line
from optimize.load.narrowing import narrow
from optimize.merged import STANDS_FOR
from optimize.wording import named as listed

_WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "ema",
    "model_ema",
    "ema_state_dict",
    "net",
    "network",
    "module",
)
_PREFIXES = {"module.": "DataParallel", "_orig_mod.": "torch.compile", "model.": "a training wrapper"}
#: What BatchNorm counts since torch 0.4.1; it plays no part in inference.
_COUNT = "num_batches_tracked"
StateDict = Mapping[str, Any]


def build(spec: str) -> torch.nn.Module:
    """Import ``package.module:factory`` and return its module in evaluation mode.

    Args:
        spec: Where a factory (called without arguments), a module class or a module object is.

    Raises:
        UsageError: The text is not of that form.
        Refused: It cannot be imported, raises, or gives no ``torch.nn.Module``.
    """
    found = named.find(spec)
    module = found if isinstance(found, torch.nn.Module) else named.call(found, spec)
    if not isinstance(module, torch.nn.Module):
        raise Refused(f"'{spec}' returned a {type(module).__name__}, not a torch.nn.Module.")
    # A module that was just made is in training mode by construction; one left in a mixed state means it.
    return module.eval() if getattr(module, "training", False) else module


def unwrap(held: Any, name: str) -> tuple[torch.nn.Module | StateDict, list[str]]:
    """Return the module or state dict in what a checkpoint held, and a warning if it had to be dug out.

    Raises:
        Refused: There is none; the message says what the file holds.
    """
    if isinstance(held, torch.nn.Module) or is_state_dict(held):
        return held, []
    if isinstance(held, Mapping):
        for key in _WRAPPERS:
            value: Any = held.get(key)
            if isinstance(value, torch.nn.Module) or is_state_dict(value):
                others = ", ".join(str(other) for other in held if other != key)[:120]
                return value, [f"Took '{key}' from the checkpoint and left the rest ({others})."]
    raise Refused(
        f"'{name}' holds {_what(held)}, not a model.", hint="Save the module or its state_dict() with torch.save."
    )


def _what(held: Any) -> str:
    if isinstance(held, torch.Tensor):
        return f"one tensor of shape {tuple(held.shape)}"
    if isinstance(held, Mapping):
        return f"a dict with the keys {', '.join(repr(key) for key in list(held)[:6])}" if held else "an empty dict"
    return f"a {type(held).__name__}"


def is_state_dict(value: Any) -> bool:
    """Tell whether a value is a mapping of names to tensors (and the extra state of modules)."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(entry, torch.Tensor) for entry in value.values())
        and all(
            isinstance(key, str) and (isinstance(entry, torch.Tensor) or key.endswith("_extra_state"))
            for key, entry in value.items()
        )
    )


def needs_model(state: StateDict, name: str) -> Refused:
    """Return the refusal of a state dict that came without a factory."""
    of_layers = [key for key in state if not key.endswith(_COUNT)] or list(state)
    return Refused(
        f"'{name}' is a state dict: {len(of_layers)} tensors ({listed(of_layers, 4)}) without the code of the model.",
        hint="Give --model package.module:factory, which makes the module that they belong to.",
    )


def fit(module: torch.nn.Module, state: StateDict, name: str) -> list[str]:
    """Copy a state dict into a module and return warnings.

    A prefix that every key carries and the module's keys do not (``module.`` of DataParallel) is cut off.

    Raises:
        Refused: The keys or shapes do not fit; the first few that differ are listed.
    """
    own = module.state_dict()
    state, notes = _without_prefix(state, own)
    differences = _differences(state, own)
    if differences:
        raise Refused(
            f"The state dict '{name}' does not fit {type(module).__name__}: {'; '.join(differences)}.",
            hint="Is --model the architecture, with the same arguments, that these weights were trained in?",
        )
    casts = sorted({f"{state[key].dtype} to {own[key].dtype}" for key in state if _is_cast(state[key], own[key])})
    try:
        module.load_state_dict(state, strict=False)
    except Exception as error:
        raise Refused(f"The state dict '{name}' does not load: {first_line(error)}") from error
    return notes + [f"Weights were converted from {cast}." for cast in casts]


def narrowed(module: torch.nn.Module, state: StateDict) -> tuple[torch.nn.Module, list[str]]:
    """Return the module with the widths of a state dict that was pruned, and a warning; else the module itself.

    Raises:
        Refused: Its code cannot be told how wide it is.
    """
    own = module.state_dict()
    state, _ = _without_prefix(state, own)
    if shorter := [key.removesuffix(f".{STANDS_FOR}") for key in state if key.endswith(f".{STANDS_FOR}")]:
        return narrow(module, state), [f"Took layers that stand for several from the state dict: {listed(shorter, 4)}."]
    others = [key for key in own if key in state and _is_other_shape(state[key], own[key])]
    is_whole = all(key in state or key.endswith(_COUNT) for key in own)
    if not others or not is_whole or not all(_is_within(state[key], own[key]) for key in others):
        return module, []  # `fit` says what is missing
    _, *more = {key.rpartition(".")[0] for key in others}
    if not more and all(state[key].shape[1:] == own[key].shape[1:] for key in others):
        return module, []  # nobody reads less: another number of outputs, which no pruning leaves
    known = f"{others[0]} is {list(state[others[0]].shape)}, not {list(own[others[0]].shape)}"
    return narrow(module, state), [
        f"The weights are narrower than --model makes them ({known}) and were taken as pruned: if they were not, the "
        "factory has other arguments."
    ]


def _is_within(value: Any, own: Any) -> bool:
    held = isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and value.dim() == own.dim()
    return held and all(size <= most for size, most in zip(value.shape, own.shape, strict=True))


def _without_prefix(state: StateDict, own: StateDict) -> tuple[StateDict, list[str]]:
    notes = []
    state = {key: value for key, value in state.items() if key in own or key != "n_averaged"}  # of an AveragedModel
    for prefix, maker in [*_PREFIXES.items()] * len(_PREFIXES):  # whoever wrapped it first
        if all(key.startswith(prefix) for key in state) and not all(key.startswith(prefix) for key in own):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
            notes.append(f"Cut '{prefix}' off the names of the state dict ({maker}).")
    return state, notes


def _differences(state: StateDict, own: StateDict) -> list[str]:
    missing = [key for key in own if key not in state and not key.endswith(_COUNT)]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} is {list(state[key].shape)} and should be {_shape(own[key])}"
        for key in own
        if key in state and _is_other_shape(state[key], own[key])
    ]
    groups = ((missing, "missing"), (unexpected, "unexpected"), (shapes, "of another shape"))
    return [f"{len(keys)} {noun}: {listed(keys, 4)}" for keys, noun in groups if keys]


def _shape(own: Any) -> str:
    return str(list(own.shape)) if isinstance(own, torch.Tensor) else "no tensor"


def _is_other_shape(value: Any, own: Any) -> bool:
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(own):
        return False
    return not isinstance(own, torch.Tensor) or value.shape != own.shape


def _is_cast(value: Any, own: Any) -> bool:
    return isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and value.dtype != own.dtype
