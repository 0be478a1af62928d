"""Before capture: a module's own copy in inference form and inputs of its own; what cannot be captured is refused here.

A file may hold a module whose parts are anything: a weight that is a number, a layer that never saw an input, a lock.
Every refusal names the layer, because only its owner can mend it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import keyword
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import TransformerEncoder
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from optimize.errors import InputsMisfit, Refused, UsageError, nearest, spell
from optimize.escaping import shortened
from optimize.graph import dtype_name
from optimize.program import name_outputs
from optimize.wording import named

#: What holds the parts of a module, and what they may be besides None.
_HOLDERS: dict[str, type] = {"_parameters": torch.nn.Parameter, "_buffers": torch.Tensor, "_modules": torch.nn.Module}

#: So many of the outputs that are left out are said by name.
_LISTED = 3


def inference_copy(module: torch.nn.Module) -> tuple[torch.nn.Module, list[str]]:
    """Return a copy without gradients that shares nothing with the module, in evaluation mode, and what to say of it.

    Raises:
        Refused: A layer has no weights yet, holds something that is none, or cannot be copied.
    """
    check_parts(module)
    try:
        source = private_copy(module)
        for tensor in source.parameters():
            tensor.requires_grad_(False)
        for path in nested_encoders(source):
            vars(source.get_submodule(path)).update(use_nested_tensor=False)  # which no export takes: see `tell_hidden`
    except Exception as error:
        raise Refused(
            f"The model cannot be copied: {_uncopied(module)}{spell(error)}.",
            hint="Keep locks, open files, generators and the like outside the module.",
        ) from error
    if not source.training:
        left = [path for path, child in source.named_modules() if child.training and not list(child.children())]
        listed = ", ".join(f"'{path}'" for path in left[:3])
        return source, [f"Left in training mode and captured so: {listed}."] if left else []
    return source.eval(), ["The module was in training mode; it was captured in evaluation mode."]


def private_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy that shares no tensor with the module, not even weights that its hooks computed."""
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in _computed(module)})


def nested_encoders(module: torch.nn.Module) -> list[str]:
    """Return the paths of torch's encoders that leave out what a padding mask hides, where there are no gradients."""
    parts = module.named_modules()
    return [path for path, part in parts if isinstance(part, TransformerEncoder) and part.use_nested_tensor]


def check_parts(module: torch.nn.Module) -> None:
    """Check that a module is made of modules and that its weights are tensors with values.

    Raises:
        Refused: A part is something else; the message names it.
    """
    for path, child in _parts(module):
        if isinstance(child, torch.jit.ScriptModule):
            raise Refused(
                f"{_named(path, child)} is TorchScript, which is no part of an eager module.",
                hint="Give it as it was before torch.jit.script or torch.jit.trace, or script all of the model.",
            )
        for holder, kind in _HOLDERS.items():
            held = vars(child).get(holder)
            if not isinstance(held, Mapping):
                raise _odd(path, child, "was made without torch.nn.Module.__init__")
            for name, value in held.items():
                _check_name(path, child, name)
                _check_part(path, child, name, value, kind)


def own_inputs(flat: Sequence[Any], dynamic_batch: bool) -> tuple[torch.Tensor, ...]:
    """Return copies of the example inputs, a batch of 1 doubled.

    They are copied because files hold them: a view of a larger tensor would be saved with all that lies around it.

    Raises:
        Refused: One is no tensor, holds no samples, or no numbers that deployed files take.
    """
    for value in flat:
        _check_input(value)
    inputs = tuple(value.detach().clone() for value in flat)
    batches = {value.shape[0] for value in inputs if value.dim()}
    if dynamic_batch and batches == {1}:
        return tuple(torch.cat([value, value]) if value.dim() else value for value in inputs)
    return inputs


#: What to look at where a module fails, in Python.
_EXAMPLES = "Check the example inputs: their order, their sizes with the batch first, their types (x.float())."


def check_it_runs(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    origin: torch.nn.Module,
    names: Sequence[str],
) -> Any:
    """Run a copy of a module once, so that inputs that do not fit are told apart from what export cannot do.

    What it writes to on that call gets its value of ``origin`` again. ``names`` are of the inputs, flat.

    Returns:
        What the module returned.

    Raises:
        Refused: It fails.
    """
    try:
        with torch.no_grad():
            own, own_keywords = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))  # it may write to them
            outputs = module(*own, **own_keywords)
    except Refused:  # a graph of another library knows what it does not read
        raise
    except Exception as error:
        inputs = dict(zip(names, pytree.tree_leaves((args, kwargs)), strict=True))
        told = [f"{name} {dtype_name(value)}{list(value.shape)}" for name, value in inputs.items()]
        what = f"The model fails on {', '.join(told) or 'no inputs'}{_where(error, module)}: {spell(error)}."
        causes = " ".join(filter(None, _causes(error, inputs)))
        raise InputsMisfit(what, causes=causes, advice=_EXAMPLES) from error
    before = _weights(origin)
    for path, value in _weights(module).items():
        if path not in before:  # a module may make its buffers on the first call
            continue
        if (value.shape, value.dtype) != (before[path].shape, before[path].dtype):
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, before[path].detach().clone())
        elif not torch.equal(value, before[path]):
            with torch.no_grad():
                value.copy_(before[path])
    return outputs


def return_tensors(module: torch.nn.Module, outputs: Any, chosen: Sequence[str] = ()) -> list[str]:
    """Let a copy of a module return the tensors of its outputs alone, where it returns None or objects beside them.

    Of the tensors those that are chosen, by name and in that order.

    Its class becomes one of the same name with another ``forward``, so that its parts keep their paths.

    Args:
        module: The copy.
        outputs: What it returned.
        chosen: Names of outputs; all where there are none.

    Returns:
        What to say of it: what is left out.

    Raises:
        UsageError: It has no output of a name that is chosen.
    """
    if not chosen and not any(map(_is_in_the_way, pytree.tree_leaves(outputs))):
        return []
    left: list[str] = []
    _choose(_tensors_of(outputs, (), left), chosen)
    kind = type(module)

    @functools.wraps(kind.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _choose(_tensors_of(kind.forward(self, *args, **kwargs), (), []), chosen)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return [] if chosen else _said_of(left)


def leave_out(spec: pytree.TreeSpec, places: Collection[int]) -> tuple[pytree.TreeSpec, list[str]]:
    """Return how outputs unflatten without those at some places, which are None, and what to say of that."""
    left: list[str] = []
    leaves = [None if place in places else place for place in range(spec.num_leaves)]
    return pytree.tree_structure(_tensors_of(pytree.tree_unflatten(leaves, spec), (), left)), _said_of(left)


def _said_of(left: Sequence[str]) -> list[str]:
    return [f"Left out of the outputs, which are tensors in a file: {named(left, _LISTED)}."] if left else []


def said_of_fixed(names: Collection[str]) -> list[str]:
    """Return what to say of arguments that are no tensors, which torch.export writes into the graph."""
    said = named([f"'{shortened(name)}'" for name in names], _LISTED)
    return [f"Arguments that are no tensors are as they were exported: {said}."] if names else []


def _choose(outputs: Any, chosen: Sequence[str]) -> Any:
    """Return the outputs of some names, by name."""
    if not chosen:
        return outputs
    named = dict(zip(name_outputs(outputs), pytree.tree_leaves(outputs), strict=True))
    for name in chosen:
        if name not in named:
            raise UsageError(f"The model has no output '{shortened(name)}' (--outputs).", hint=nearest(name, named))
    return {name: named[name] for name in chosen}


def _is_in_the_way(value: Any) -> bool:
    """Say whether an output is None or an object, such as a cache; a number of the model's own is refused as one."""
    return not isinstance(value, torch.Tensor | int | float | complex | str | bytes)


def _tensors_of(value: Any, path: tuple[Any, ...], left: list[str]) -> Any:
    """Return an output without what is in the way, its fields by name; what that is goes to ``left``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, Mapping | tuple | list):
        return value
    held = [*value.items()] if isinstance(value, Mapping) else [*enumerate(value)]
    kept = {}
    for key, part in held:
        found = _tensors_of(part, (*path, key), left)
        if any(map(_is_in_the_way, pytree.tree_leaves(found))):
            left.append(f"'{'.'.join(map(str, (*path, key)))}' ({'None' if part is None else type(part).__name__})")
        else:
            kept[key] = found
    return kept if isinstance(value, Mapping) else tuple(kept.values())


def _parts(module: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module once with its path; unlike ``named_modules`` it stops at what is none."""
    seen = set() if seen is None else seen
    if not isinstance(module, torch.nn.Module) or id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        yield from _parts(child, f"{path}.{name}".lstrip("."), seen)


def _check_name(path: str, child: torch.nn.Module, name: Any) -> None:
    """Check that a name can stand in the Python code that torch.fx writes of a graph, between double quotes.

    A name with a quote in it would end there, and what follows would run as code.
    """
    if not isinstance(name, str) or not name.isprintable() or keyword.iskeyword(name) or {'"', "\\"} & set(name):
        raise Refused(
            f"{_named(path, child)} has a part with the name '{name}', which code cannot name.",
            hint="Rename it: letters, digits, spaces and most signs will do, but no quotes and no words of Python.",
        )


def _check_part(path: str, child: torch.nn.Module, name: str, value: Any, kind: type) -> None:
    """Check one entry of a module's holders; None is allowed everywhere."""
    if value is not None and not isinstance(value, kind):
        raise _odd(path, child, f"has '{name}' of the type {type(value).__name__}; a {kind.__name__} belongs there")
    if not isinstance(value, torch.Tensor):
        return
    if is_lazy(value):
        raise Refused(
            f"{_named(path, child)} has no weights yet: '{name}' gets its size from the first input it sees.",
            hint="Run the model once on an example, then save it.",
        )
    if value.is_meta:
        raise _odd(path, child, f"has no values in '{name}': it was made on the device 'meta'")


_CHANNELS_LAST = "Channels seem to be last: models take [N, C, H, W]; beside --include-preprocess say --input-shape."


def _causes(error: Exception, inputs: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield what the error, and the inputs by name, show to be wrong."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer, looked_up = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(layer, torch.nn.Embedding) and isinstance(looked_up, torch.Tensor) and looked_up.numel():
            most = int(looked_up.max())
            if most >= layer.num_embeddings:
                yield (
                    f"Tokens go up to {most:,}, and the table has {layer.num_embeddings:,} rows: is it this model's "
                    "tokenizer?"
                )
    for name, value in inputs.items():
        if "bool" in str(error) and is_truths(value):
            yield f"'{name}' is {dtype_name(value)}: compare it where it is read ({name} != 0), or give bool."
    for sizes in (value.shape[2:] for value in inputs.values()):
        if len(sizes) == 3 and sizes[0] in (1, 3):  # looks like pictures with two batches
            yield f"Leave the batch out of the sizes: {','.join(map(str, sizes))}."
    if any(_is_last(value.shape) for value in inputs.values()):
        yield _CHANNELS_LAST


def is_truths(value: torch.Tensor) -> bool:
    """Say whether integers are 0 and 1 alone, as a mask is."""
    return not (value.is_floating_point() or value.dtype is torch.bool) and bool(((value == 0) | (value == 1)).all())


def _is_last(shape: Sequence[int]) -> bool:
    """Tell whether a shape looks like pictures ``[N, H, W, C]``."""
    return len(shape) == 4 and shape[3] in (1, 3, 4) and shape[1] > 4


def _check_input(value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise Refused(
            f"Example inputs must be tensors; found {type(value).__name__}.",
            hint="torch.from_numpy makes one of an array, torch.rand(1, 3, 224, 224) of a shape. Constants are bound "
            "before, for example in a small wrapper module.",
        )
    if value.is_complex():
        raise Refused(
            "An example input is complex; deployed files take none.", hint="Take torch.view_as_real(x) in its place."
        )
    if value.dim() and value.shape[0] == 0:
        raise Refused("The example inputs hold no samples.", hint="Give at least one.")


def _computed(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights that hooks have computed from others (weight norm, pruning masks): they refuse to be copied."""
    for child in module.modules():
        held = (*vars(child).values(), *child._buffers.values())
        yield from (value for value in held if isinstance(value, torch.Tensor) and not value.is_leaf)


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _uncopied(module: torch.nn.Module) -> str:
    """Name the first attribute that cannot be copied, if it is one of a module's own."""
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name not in _HOLDERS:
                try:
                    copy.deepcopy(value)
                except Exception:
                    return f"'{name}' of {_named(path, child, start=False)}: "
    return ""


def _where(error: BaseException, module: torch.nn.Module) -> str:
    """Say in which layer an error was raised; nothing where it was the model's own code."""
    paths = {id(child): (path, child) for path, child in module.named_modules() if path}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        found = paths.get(id(frame.f_locals.get("self")))
        if found is not None:
            return f" in {_named(*found, start=False)}"
    return ""


def _odd(path: str, child: torch.nn.Module, what: str) -> Refused:
    return Refused(f"{_named(path, child)} {what}.", hint="Mend the module where it is made, and save it again.")


def _named(path: str, child: torch.nn.Module, *, start: bool = True) -> str:
    """Return a layer as a sentence names it.

    >>> _named("head", torch.nn.ReLU()), _named("", torch.nn.ReLU(), start=False)
    ("The layer 'head' (ReLU)", 'the model (ReLU)')
    """
    text = f"he layer '{path}' ({type(child).__name__})" if path else f"he model ({type(child).__name__})"
    return ("T" if start else "t") + text
