"""Modules of torch.nn with names and attributes that nobody gives them, saved as an honest one is."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from tests.fuzzing import hostile, networks

# The format before 1.6 reads the source of each class again for each file.
torch.serialization.get_source_lines_and_file = functools.cache(torch.serialization.get_source_lines_and_file)

_METHODS = (
    "forward", "_forward_hooks", "_call_impl", "__call__", "extra_repr", "__class__", "_get_name", "state_dict", "eval",
    "named_parameters", "modules", "_apply", "train", "to",
)  # fmt: skip
_CLASSES = (
    nn.Linear, nn.LSTM, nn.ModuleList, nn.Dropout, nn.MultiheadAttention, nn.Module, nn.ParameterList, nn.LazyLinear,
    nn.Flatten, nn.Upsample, nn.Unfold, nn.SyncBatchNorm, nn.CrossMapLRN2d,
)  # fmt: skip


def mutated(data: bytes, chance: random.Random, *, zipped: bool) -> bytes:
    """Return, for whatever file, that of a module with one to four changes; of those that no file can hold, another."""
    module = chance.choice(networks.plain())
    while True:
        buffer = io.BytesIO()
        with contextlib.suppress(Exception):
            changed = _changed(module, chance)
            protocol = chance.choice((2, 2, 4))
            torch.save(changed, buffer, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
            return buffer.getvalue()


def _changed(module: nn.Module, chance: random.Random) -> nn.Module:
    changed = copy.deepcopy(module)
    for _ in range(chance.choice((1, 1, 2, 4))):
        modules = [child for child in _walk(changed, 0) if isinstance(child.__dict__.get("_modules"), dict)]
        if modules:
            chance.choice(_CHANGES)(chance.choice(modules), modules, chance)
    return changed


def _walk(module: Any, depth: int) -> list[nn.Module]:
    """Return modules in modules, in whatever holds them by now."""
    held = module.__dict__.get("_modules")
    inner = held.values() if isinstance(held, dict) and depth < 5 else ()
    return [module, *(found for child in inner if isinstance(child, nn.Module) for found in _walk(child, depth + 1))]


def _odd(modules: list[nn.Module], chance: random.Random) -> Any:
    """Return a value that a pickle of plain torch objects can hold."""
    return chance.choice((
        lambda: None, lambda: chance.choice(hostile.NUMBERS), lambda: hostile.text(chance), list, dict,
        lambda: torch.zeros(2), lambda: nn.Parameter(torch.zeros(2, 2)), lambda: nn.ReLU, lambda: nn.functional.relu,
        lambda: torch.float64, lambda: torch.Size([2]), lambda: chance.choice(modules), lambda: OrderedDict(a=1),
        lambda: {1: torch.zeros(1)}, lambda: {hostile.text(chance): chance.choice(modules)}, lambda: (1, "x"),
        lambda: nn.Module, lambda: set(), lambda: float("nan"), lambda: True, lambda: b"x", lambda: hostile.nested(300),
        lambda: torch.zeros(1).expand(10**6, 10**5), lambda: torch.zeros(1, dtype=torch.complex64), lambda: 1 << 40_000,
        lambda: torch.zeros(2, 2).to_sparse(), lambda: nn.Linear(2, 2), lambda: {"0": nn.Linear(2, 2)},
    ))()  # fmt: skip


def _attribute(module: nn.Module, modules: list[nn.Module], chance: random.Random) -> None:
    module.__dict__[chance.choice(list(module.__dict__))] = _odd(modules, chance)


def _new_attribute(module: nn.Module, modules: list[nn.Module], chance: random.Random) -> None:
    names = (*_METHODS, hostile.text(chance))
    module.__dict__[chance.choice(names)] = _odd(modules, chance)


def _member(module: nn.Module, modules: list[nn.Module], chance: random.Random) -> None:
    """Put something under a name among the submodules, parameters or buffers."""
    held = module.__dict__.get(chance.choice(("_modules", "_parameters", "_buffers")))
    if isinstance(held, dict):
        name = chance.choice((hostile.text(chance), chance.choice((0, None, 1.5, True, ("a",))), *held))
        held[name] = chance.choice((_odd(modules, chance), chance.choice(modules), torch.zeros(2)))


def _rename(module: nn.Module, modules: list[nn.Module], chance: random.Random) -> None:
    held = module.__dict__.get(chance.choice(("_modules", "_parameters", "_buffers")))
    if isinstance(held, dict) and held:
        held[hostile.text(chance)] = held.pop(chance.choice(list(held)))


def _class(module: nn.Module, modules: list[nn.Module], chance: random.Random) -> None:
    """Let a module be of another class of torch.nn."""
    object.__setattr__(module, "__class__", chance.choice(_CLASSES))


def _number(module: nn.Module, modules: list[nn.Module], chance: random.Random) -> None:
    names = [name for name, value in module.__dict__.items() if isinstance(value, int | float | tuple)]
    if names:
        number = chance.choice((*hostile.NUMBERS, 0.5))
        module.__dict__[chance.choice(names)] = chance.choice((number, (number, number), True))


_CHANGES = (_attribute, _new_attribute, _member, _member, _rename, _class, _number)
