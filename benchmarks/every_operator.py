"""Export every operator that torch itself tests, and hold each file against the module.

    pip install expecttest          # torch's own samples of its operators need it
    python -m benchmarks.every_operator [--targets onnx,openvino,torchscript] [--samples 3] [--only NAME ...]

Each operator of ``op_db`` (torch/testing/_internal) is a module that takes the tensors of its samples, captured and
exported as a user would. A file is right, or it is refused by name; anything else is printed: a wrong answer, a file
that does not run, an error of another kind, more than a minute.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimize
from benchmarks.conditions import conditions
from optimize.errors import OptimizeError
from optimize.program import Program
from optimize.registry import find_target

#: Seconds that one capture, or one file, may take.
LIMIT_S = 60
#: What an answer may be apart by, of itself and of the largest.
RELATIVE, ABSOLUTE = 1e-3, 1e-4


@dataclass(frozen=True)
class Sample:
    """An operator with the arguments of one sample.

    Attributes:
        name: Of the operator.
        module: Calls it; takes its tensors, in order.
        given: The tensors.
    """

    name: str
    module: nn.Module
    given: tuple[Tensor, ...]

    def answers(self) -> list[Tensor]:
        """Return what the module answers, of copies: an operator may write to what it is given."""
        with torch.no_grad():
            return pytree.tree_leaves(self.module(*(value.clone() for value in self.given)))


class Operator(nn.Module):
    """One operator; complex answers are pairs of real ones, as deployed files return them."""

    def __init__(self, op: Any, arguments: Any) -> None:
        super().__init__()
        self.op = op
        leaves, self.structure = pytree.tree_flatten(arguments)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *given: Tensor) -> Any:
        """Call the operator with the tensors in their places."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, given, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        made = pytree.tree_leaves(self.op(*args, **kwargs))
        return tuple(torch.view_as_real(value) if value.is_complex() else value for value in made)


def draw(samples: int, only: Sequence[str]) -> Iterator[Sample]:
    """Yield samples of every operator that computes in float32, spread over those that torch has."""
    from torch.testing._internal.common_methods_invocations import op_db

    for entry in op_db:
        if torch.float32 not in entry.dtypes or (only and entry.name not in only):
            continue
        drawn = list(entry.sample_inputs("cpu", torch.float32, requires_grad=False))
        for sample in drawn[:: max(1, len(drawn) // samples)][:samples]:
            arguments = ((sample.input, *sample.args), dict(sample.kwargs))
            given = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
            if given and all(value.numel() for value in given):
                name = f"{entry.name} {entry.variant_test_name}".rstrip()
                yield Sample(name, Operator(entry.op, arguments).eval(), tuple(given))


def differs(answers: Sequence[Any], wanted: Sequence[Tensor]) -> str:
    """Say how answers differ from those wanted; nothing where they do not."""
    if len(answers) != len(wanted):
        return f"{len(answers)} outputs for {len(wanted)}"
    for answer, tensor in zip(answers, wanted, strict=True):
        value = tensor.numpy()
        if answer.shape != value.shape or answer.dtype != value.dtype:
            return f"{answer.dtype}{[*answer.shape]} for {value.dtype}{[*value.shape]}"
        largest = np.abs(value[np.isfinite(value)]).max(initial=1.0)
        if not np.allclose(answer, value, rtol=RELATIVE, atol=ABSOLUTE * largest, equal_nan=True):
            return (
                f"values apart by {np.nanmax(np.abs(answer.astype(float) - value.astype(float))):.2g} of {largest:.2g}"
            )
    return ""


def is_drawn(program: Program) -> bool:
    """Say whether a program draws random numbers: no two answers are the same."""
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in calls)


def try_file(program: Program, target: str, given: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """Write a program for a target, run the file, and return what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = optimize.export(program, target, Path(folder) / f"net{find_target(target).suffix}")
        how = differs(artifact.load(threads=1).run([value.numpy() for value in given]), wanted)
    return f"wrong: {how}" if how else "right"


def limited(compute: Any, *args: Any) -> Any:
    """Return what a function makes within the limit, or a text that says how it ended."""
    signal.alarm(LIMIT_S)
    try:
        return compute(*args)
    except TimeoutError:
        return f"wrong: more than {LIMIT_S} s"
    except OptimizeError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def _stop(*_: Any) -> None:
    raise TimeoutError


def main() -> None:
    """Go through all operators, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="onnx,openvino,torchscript")
    parser.add_argument("--samples", type=int, default=3, help="Samples of an operator, at most.")
    parser.add_argument("--only", nargs="*", default=[], help="Names of operators.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, _stop)
    targets = options.targets.split(",")
    print(conditions("torch", "onnx", "onnxruntime", "openvino"))
    counted = {target: Counter[str]() for target in ("capture", *targets)}
    refused = {target: set[str]() for target in targets}
    for sample in draw(options.samples, options.only):
        try:
            wanted = sample.answers()
        except Exception:
            continue  # of samples that shall fail there are some
        program = limited(optimize.capture, sample.module, tuple(value.clone() for value in sample.given))
        if isinstance(program, Program) and is_drawn(program):
            continue
        counted["capture"]["right" if isinstance(program, Program) else program.partition(":")[0]] += 1
        for target in targets if isinstance(program, Program) else ():
            found = limited(try_file, program, target, sample.given, wanted)
            counted[target][found.partition(":")[0]] += 1
            if found.startswith("wrong"):
                shapes = ", ".join(str([*value.shape]) for value in sample.given)
                print(f"{sample.name} ({shapes}), {target}: {' '.join(found.split())[:150]}")
            elif found != "right":
                refused[target].add(sample.name)
    for where, counts in counted.items():
        print(f"{where}: " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    for target, names in refused.items():
        print(f"{target} refuses samples of {len(names)} operators: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
