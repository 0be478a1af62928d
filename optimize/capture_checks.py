"""Whether a captured model answers as its module does: on its example inputs, on one of them, at other sizes."""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize import graph, ops
from optimize.bindings import BatchFixed
from optimize.dimensions import BATCH
from optimize.distances import CAP_DB, output_error, ratio_db
from optimize.errors import Refused, VerificationFailed, first_line
from optimize.graph import aten
from optimize.invariants import EXACT_TOLERANCE, allowed_errors
from optimize.preparation import is_truths, nested_encoders
from optimize.program import Program, tensor_value
from optimize.wording import decibels, named

_HINT = (
    "Resample an embedding that has one size, pool to one size before a Linear, or leave the dimension out of "
    "--dynamic and --dynamic-size."
)

#: Kernels of one layer are nearer to each other than this, in float16 too.
_ALIKE_DB = 40.0
#: Sizes that a model excepts, of which so many are tried, and none that is so many times the example's.
_MOST_EXCEPTIONS, _MOST_TIMES = 8, 8
#: What whole numbers are drawn below that no table says anything of.
_BOUNDS = (100, 10, 2, 1)
_LOOK_UPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default)


def finite_examples(module: torch.nn.Module, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return example inputs that a module answers with numbers: one that is zeros, a mask of nothing, becomes ones.

    A mask of data is 0 and 1 and may have to be of truths. They are returned as they are where that does not help.
    """
    given = enumerate(inputs)
    whole = [(place, x) for place, x in given if isinstance(x, torch.Tensor) and not x.is_floating_point()]
    masks = [(place, torch.ones_like(x)) for place, x in whole if not x.any()]
    masks += [(place, x.bool()) for place, x in whole if x.any() and is_truths(x)]

    def answer(tried: Sequence[Any]) -> Any:
        return copy.deepcopy(module).eval()(*copy.deepcopy(tried))

    if not masks or _answers_finitely(answer, inputs):
        return inputs
    opened = ([*inputs[:place], mask, *inputs[place + 1 :]] for place, mask in masks)
    return next((found for found in opened if _answers_finitely(answer, found)), inputs)


def _answers_finitely(answer: Callable[[Sequence[Any]], Any], inputs: Sequence[Any]) -> bool:
    try:
        with torch.no_grad():
            leaves = pytree.tree_leaves(answer(inputs))
    except Exception:  # told by what captures it
        return False
    return all(bool(value.isfinite().all()) for value in leaves if isinstance(value, torch.Tensor))


def vary_tokens(program: Program) -> Program:
    """Return the program with random tokens in place of constant ones, and with masks that let everything through.

    Passes are verified and files are judged on the example inputs: one token in every place, or nothing that is
    attended to, would hide nearly all errors. Tokens are drawn within the smallest table that each input reads; where
    none does, below the largest of a few bounds that the program takes: they may be places in something else.
    """
    if not any(map(_is_constant, program.inputs)):
        return program
    masks = {place for place, node in enumerate(program.placeholders) if _is_mask(program, node, place)}
    drawn = [_drawn(program, most) for most in _BOUNDS]
    inputs = next((found for found in drawn if _answers_finitely(program.run, found)), drawn[-1])
    varied = replace(program, inputs=inputs)
    open_masks = tuple(torch.ones_like(value) if place in masks else value for place, value in enumerate(inputs))
    return replace(varied, inputs=open_masks) if masks and _answers_finitely(program.run, open_masks) else varied


def _drawn(program: Program, most: int) -> tuple[torch.Tensor, ...]:
    """Return the example inputs with tokens in place of constant ones, below a bound where no table is known."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randint(0, _vocabulary(program, place, most), tensor.shape, generator=generator).to(tensor.dtype)
        if _is_constant(tensor)
        else tensor
        for place, tensor in enumerate(program.inputs)
    )


def _is_constant(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype is not torch.bool and bool((tensor == 0).all())


def _is_mask(program: Program, node: fx.Node, place: int) -> bool:
    """Say whether an input is zeros and becomes, moved about, numbers to compute with or truths: a mask of tokens.

    What an embedding reads is tokens, also where a mask is made of them, what is looked up elsewhere is places, and
    bytes ``[N, C, H, W]`` are pictures.
    """
    readers, given = list(_moved(node)), program.inputs[place]
    if not _is_constant(given) or any(graph.is_call(user, *_LOOK_UPS) for user in readers):
        return False
    if given.dtype is torch.uint8 and given.dim() > 2:
        return False
    made = [value.dtype for user in readers if (value := tensor_value(user)) is not None]
    return any(dtype.is_floating_point or dtype is torch.bool for dtype in made)


def _moved(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a value, and of what moves it or counts from the end (``where(x < 0, x + 9, x)``)."""
    for user in node.users:
        is_counted = user.target is aten.where.self and user.args[2] is node
        if is_counted or user.target in (*ops.PERMUTATIONS, *ops.SELECTIONS):
            yield from _moved(user)
        else:
            yield user


def _vocabulary(program: Program, index: int, most: int) -> int:
    """Return the rows of the smallest embedding that reads an input directly; else ``most``, of bytes first all."""
    placeholder = program.placeholders[index]
    most = 256 if most == _BOUNDS[0] and program.inputs[index].dtype is torch.uint8 else most
    tables = [
        graph.constant(program.graph_module, node.args[0])
        for node in graph.calls(program.graph, aten.embedding.default)
        if node.args[1] is placeholder
    ]
    return min((table.shape[0] for table in tables if table is not None), default=most)


def tell_fixed_length(program: Program) -> list[str]:
    """Return what to say of a program whose tokens ``[N, T]`` have one length, where nobody said that it is free."""
    lines = ((place, value) for place, value in enumerate(program.inputs) if value.dim() == 2 and value.shape[1] > 1)
    lengths = sorted({value.shape[1] for place, value in lines if _vocabulary(program, place, 1) > 1})
    told = f"The files take {named([str(size) for size in lengths], 3)} tokens, neither more nor fewer: "
    return [f"{told}--dynamic sequence leaves the length free."] if lengths else []


def check_capture(program: Program, *, may_fix: bool = False) -> None:
    """Compare a captured program with the eager module it came from; nothing to do where there is none.

    Args:
        program: Captured from it.
        may_fix: Whether a batch that nobody has named may become a fixed one.

    Raises:
        VerificationFailed: They differ: capture itself would be wrong.
        Refused: They differ for one sample alone, which torch.export takes for any other batch.
        BatchFixed: The module takes no other batch, and it may be fixed.
    """
    if program.source is None:
        return
    wanted, found = _expected(program, program.inputs), program.run(program.inputs)
    if _excess(wanted, found) and (error := _excess(wanted, found, allowed_errors(program, program.inputs))):
        raise VerificationFailed(
            f"The captured graph differs from the module by {error:.2e}.",
            hint="The module may compute something new on every call (random numbers, a counter).",
        )
    if program.batch is not None:
        _check_batch(program, may_fix=may_fix)


def tell_hidden(program: Program, module: torch.nn.Module) -> list[str]:
    """Return what to say where a module's own encoders answer otherwise than those of the copy that was captured.

    Without gradients they write zeros where a padding mask hides (`nested_encoders`), which may be read behind them.
    Both are asked on the examples, and with the last half of them hidden.
    """
    if not (paths := nested_encoders(module)):
        return []
    apart, own = CAP_DB, copy.deepcopy(program.source)
    assert own is not None
    for path in paths:
        vars(own.get_submodule(path)).update(use_nested_tensor=True)
    for inputs in (program.inputs, tuple(map(_hide, program.inputs))):
        with contextlib.suppress(Exception):  # the second may be no inputs of this model
            for want, found in zip(_expected(replace(program, source=own), inputs), program.run(inputs), strict=True):
                wide = want.double()
                apart = min(apart, ratio_db(float(wide.square().sum()), float((wide - found).square().sum())))
    if apart > _ALIKE_DB:
        return []
    return [
        f"Under torch.no_grad() nn.TransformerEncoder ({named(paths, 3)}) writes zeros where its padding mask hides, "
        f"and the module is {decibels(apart)} from the files, which compute there as in training. Leave these places "
        "out behind it, as by a mean over the others, or set its use_nested_tensor = False where you judge the module."
    ]


def attributes(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Return what a module and those in it hold as attributes of Python, by path and name."""
    return {(path, name): value for path, part in module.named_modules() for name, value in vars(part).items()}


def tell_kept(program: Program, module: torch.nn.Module, changed: Collection[str]) -> list[str]:
    """Return what to say of a module that answers otherwise once it was called.

    Args:
        program: Captured from it.
        module: As it was given; copies of it are called.
        changed: Attributes that a call changes: where there are none, nothing is tried.
    """

    def answer(*calls: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = replace(program, source=copy.deepcopy(module).eval())
        answers = [_expected(own, tuple(inputs)) for inputs in calls]
        return [leaf for leaf in answers[-1] if isinstance(leaf, torch.Tensor)]

    turned = (each.flip(0) if each.dim() else each for each in program.inputs)
    other = program.sample(1) if program.batch is not None else tuple(turned)
    with contextlib.suppress(Exception):  # what takes no other sample, or answers nothing to be compared
        if changed and not _agree(answer(other), answer(program.inputs, other)):
            kept = named(sorted(changed), 3)
            return [f"The model keeps {kept} between calls and answers by it; the files keep it as it was at capture."]
    return []


def _hide(value: torch.Tensor) -> torch.Tensor:
    """Return a mask, or tokens, with the last half of each sample hidden; floats, and masks that hide, as they are."""
    is_mask = value.dtype is torch.bool
    if value.dim() < 2 or value.is_floating_point() or (is_mask and bool((value != value.flatten()[0]).any())):
        return value
    hidden = value.clone()
    hidden[..., value.shape[-1] // 2 :] = ~value[..., value.shape[-1] // 2 :] if is_mask else 0
    return hidden


def _check_batch(program: Program, *, may_fix: bool) -> None:
    if may_fix and not _states_follow_batch(program):
        raise BatchFixed("a recurrent layer begins with states of so many samples")
    inputs, expected, error = program.sample(1), list[torch.Tensor](), None
    try:
        expected = _expected(program, inputs)
    except Exception as found:  # some take no statistics over one sample
        error = found
    if may_fix and (why := _why_fixed(program, error)):
        raise BatchFixed(why) from error
    if error or _agree(expected, program.run(inputs)):
        return
    if _agree(expected, _expected(program, inputs)):  # a module that counts its calls answers otherwise anyway
        raise Refused(
            "The model computes otherwise with a batch of 1 than with others, so the batch cannot stay free.",
            hint="Fix it (--static-batch 1, dynamic_batch=False), or let the model compute alike for any batch.",
        )


def _states_follow_batch(program: Program) -> bool:
    """Say whether every recurrent layer's initial state has its input's batch.

    A state of a fixed batch passes shape propagation; with another one the kernel ends the process.
    """
    for node in graph.calls(program.graph, *ops.RECURRENT):
        x, states, *rest = node.args
        state = states[0] if isinstance(states, list | tuple) else states
        batch_axis = 0 if rest[-1] else 1  # the last argument is batch_first
        if str(state.meta["val"].shape[1]) != str(x.meta["val"].shape[batch_axis]):  # type: ignore[union-attr]
            return False
    return True


def _why_fixed(program: Program, error: Exception | None) -> str:
    """Return why a module takes no batch but its example's; empty where it takes a larger one.

    Inputs may be no samples: others point at their rows, as edges do at a graph's nodes, and find them in a longer one.

    Args:
        program: Captured from it.
        error: What it says to one sample; None where it answers.
    """
    if error is not None and re.search(r"(?<!selected )\bindex\b.* out of (bounds|range)", str(error)):
        what = "the model points" if all(map(torch.is_floating_point, program.inputs)) else "other inputs point"
        return f"{what} at its rows, as edges at the nodes of a graph, and a part of them is no input"
    count = program.samples
    more = sorted({program.free[BATCH].within(size) for size in (count + 1, 2 * count)} - {count})
    fails = more and all(_answer(program, {BATCH: size}) is None for size in more)
    return f"the model fails on batches of {named([str(size) for size in more], 2)}" if fails else ""


def answers_apart(program: Program, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Say whether a program of a free batch answers for two batches as its module does for each alone.

    Args:
        program: Captured from a module that was made for one batch.
        inputs: What that takes, flat.
    """
    pairs = [
        (value, value.flip(*range(value.dim()))) if BATCH in dims.values() else (value,)
        for value, dims in zip(inputs, program.dynamic, strict=True)
    ]
    turned, both = tuple(pair[-1] for pair in pairs), [torch.cat(pair) if pair[1:] else pair[0] for pair in pairs]
    with contextlib.suppress(Exception):  # what takes no two batches
        parts = zip(_expected(program, inputs), _expected(program, turned), program.run(both), strict=True)
        return all(itertools.starmap(_is_joined, parts))
    return False


def _is_joined(one: torch.Tensor, other: torch.Tensor, found: torch.Tensor) -> bool:
    """Say whether a tensor is two in a row, along the one dimension that is longer, or both of them where none is."""
    longer = [dim for dim, size in enumerate(one.shape) if found.shape[dim] != size]
    return _agree([torch.cat([one, other], longer[0])], [found]) if longer else _agree([one, one], [other, found])


def check_exceptions(program: Program) -> None:
    """Run a program beside its module at the sizes that a branch of the module excepts: a graph has one way alone.

    Raises:
        Refused: They answer otherwise there.
    """
    for name, size in _exceptions(program) if program.source is not None else ():
        expected = _answer(program, {name: size})
        if expected is not None and not _agree(expected, program.run(program.resized({name: size}))):
            raise Refused(
                f"The model computes otherwise where '{name}' is {size}, so that cannot stay free.",
                hint="Leave it out of --dynamic and --dynamic-size, or let the model compute alike for any size.",
            )


def _exceptions(program: Program) -> list[tuple[str, int]]:
    """Return the sizes of free dimensions, by name, that the model compared with another one while it was captured."""
    found = dict[tuple[str, int], None]()
    for placeholder, dims in zip(program.placeholders, program.dynamic, strict=True):
        for dim, name in dims.items():
            free = placeholder.meta["val"].shape[dim]
            guards = free.node.shape_env.guards if isinstance(free, torch.SymInt) else ()
            pairs = (guard.expr.args for guard in guards if isinstance(guard.expr, sympy.Ne))
            found |= {(name, int(size)): None for one, size in pairs if one == free.node.expr and size.is_Integer}
    most = {name: _MOST_TIMES * size for name, size in program.example_sizes().items()}
    held = ((name, size) for name, size in found if program.free[name].holds(size) and size <= most[name])
    return list(itertools.islice(held, _MOST_EXCEPTIONS))


def _agree(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    shapes = zip(expected, found, strict=True)
    return all(want.shape == got.shape for want, got in shapes) and not _excess(expected, found)


def _excess(
    expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor], allowed: Sequence[float] | None = None
) -> float:
    """Return the first error of an output that is no mere rounding, by its dtype or as allowed; 0 where none is."""
    usual = [EXACT_TOLERANCE.get(want.dtype, 0.0) for want in expected]
    for want, got, most in zip(expected, found, allowed or usual, strict=True):
        error, scale = output_error(want, got)
        if error > most * scale:
            return error
    return 0.0


#: Smaller sizes of a free dimension: an odd one finds what even ones hide.
_SMALLER = (lambda size: size // 2 | 1, lambda size: size // 2, lambda size: size * 3 // 4)


def check_sizes(program: Program) -> Program:
    """Run a program beside its module at a larger and a smaller size of all that is free besides the batch.

    Returns:
        The program, which remembers the sizes. Where the module itself takes no larger one, that is the largest.

    Raises:
        Refused: It computes with the size of the example; the message names the layer.
    """
    examples = {name: size for name, size in program.example_sizes().items() if name != BATCH}
    if program.source is None or not examples:
        return program
    doubled = {
        name: program.free[name].within(size * (2 + place % 2)) for place, (name, size) in enumerate(examples.items())
    }
    answer = functools.cache(lambda *sizes: _answer(program, dict(zip(examples, sizes, strict=True))))
    larger = _largest(answer, examples, doubled)
    smaller = (
        {name: program.free[name].within(smaller(size)) for name, size in examples.items()} for smaller in _SMALLER
    )
    less = next((sizes for sizes in smaller if answer(*sizes.values()) is not None), examples)
    tried = [sizes for sizes in (larger, less) if sizes != examples]
    for sizes in tried or [doubled]:  # where the module takes no other size, what fails is told
        _check_at(program, sizes, answer(*sizes.values()))
    free = dict(program.free)
    for name, size in examples.items():
        most = free[name].most if larger == doubled else larger[name]
        others = tuple(dict.fromkeys(sizes[name] for sizes in tried if sizes[name] != size))
        free[name] = replace(free[name], most=most, others=others)
    return replace(program, free=free)


def _largest(
    answer: Callable[..., list[torch.Tensor] | None], examples: dict[str, int], most: dict[str, int]
) -> dict[str, int]:
    """Return the largest sizes, from the examples' to ``most``, that the module takes; of several all or none."""
    if answer(*most.values()) is not None:
        return most
    if len(examples) > 1:
        return examples
    ((name, taken),), (refused,) = examples.items(), most.values()
    more = range(taken + 1, refused)
    return {name: taken + bisect.bisect_left(more, True, key=lambda size: answer(size) is None)}


def _answer(program: Program, sizes: Mapping[str, int]) -> list[torch.Tensor] | None:
    """Return what the module answers at some sizes; None where it fails: some take no statistics over one sample."""
    with contextlib.suppress(Exception):
        return _expected(program, program.resized(sizes))
    return None


def _check_at(program: Program, sizes: Mapping[str, int], expected: Sequence[torch.Tensor] | None) -> None:
    inputs = program.resized(sizes)
    shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    located = _Located(program)
    try:
        with torch.inference_mode():
            found: tuple[torch.Tensor, ...] = located.run(*inputs)
    except Exception as error:
        where = graph.origin(located.reached) if located.reached is not None else ""
        raise Refused(
            f"The model fixes its {' or '.join(sizes)}: '{where}' fails on {shapes}: {first_line(error)}", hint=_HINT
        ) from error
    if expected is None or not _agree(expected, found):
        raise Refused(f"The captured graph answers differently from the module on {shapes}.", hint=_HINT)


class _Located(fx.Interpreter):
    """Runs a graph and remembers the node it has come to."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.graph_module)
        self.reached: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.reached = n
        return super().run_node(n)


def _expected(program: Program, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return what the module answers to copies of the inputs: it may write to them."""
    assert program.source is not None
    with torch.inference_mode():
        arguments, keywords = pytree.tree_unflatten([tensor.clone() for tensor in inputs], program.in_spec)
        flat, _ = pytree.tree_flatten(program.source(*arguments, **keywords))
    return flat
