"""Programs that run a file in its runtime without this package, for whoever reads the report of a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from string import Template

from optimize.escaping import plain
from optimize.targets.base import Target, TensorSpec

#: Types that NumPy and C++ have by themselves.
_CPP = {
    "float32": "float", "float64": "double", "int64": "int64_t", "int32": "int32_t", "int16": "int16_t",
    "int8": "int8_t", "uint8": "uint8_t",
}  # fmt: skip
_NUMPY = frozenset({*_CPP, "bool", "float16"})
#: What stands for a free dimension: one sample, and a size that images and sequences both have.
_FREE = (1, 32)


def snippets(
    target: Target,
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    versions: Mapping[str, str],
    preprocess: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield what runs a file, as (language, program): with what the target says of itself (``Target.alone``).

    Args:
        target: The one that wrote it.
        name: Of the file, as it is found from where the program runs.
        inputs: What it takes.
        outputs: What it gives.
        versions: Packages that it was written and measured with.
        preprocess: How pictures become its first input, in the words of ``--preprocess``.
    """
    types = {spec.dtype for spec in (*inputs, *outputs)}
    runtime = next(iter(re.findall(r"^import (\w+)", target.alone, re.MULTILINE)), "")
    about = f"{name} with {runtime} {versions.get(runtime, '')}".strip()
    said = f"pictures: {preprocess}" if preprocess else ""
    if target.alone and types <= _NUMPY:
        lines = [f"# {plain(text)}" for text in (about, said) if text]
        feeds = [
            f"    {json.dumps(spec.name)}: numpy.zeros({sizes(spec)}, {spec.dtype!r}),{_free(spec, '#')}"
            for spec in inputs
        ]
        names = json.dumps([spec.name for spec in outputs])
        shown = [f"for name, value in zip({names}, f(*inputs.values())):", "    print(name, value.dtype, value.shape)"]
        given = [f"path = {json.dumps(name)}", target.alone.strip(), "", "inputs = {", *feeds, "}", *shown]
        yield "Python", "\n".join([*lines, "import numpy", "", *given]) + "\n"
    feed, program = target.alone_cpp
    if program and types <= _CPP.keys():
        each = [
            Template(feed).substitute(
                at=at,
                name=json.dumps(spec.name),
                type=_CPP[spec.dtype],
                count=math.prod(sizes(spec)),
                sizes=", ".join(map(str, sizes(spec))),
                free=_free(spec, "//"),
            )
            for at, spec in enumerate(inputs)
        ]
        filled = Template(program).substitute(
            path=json.dumps(name),
            feeds="\n".join(each),
            inputs=", ".join(json.dumps(spec.name) for spec in inputs),
            outputs=", ".join(json.dumps(spec.name) for spec in outputs),
        )
        yield "C++", "".join(f"// {plain(text)}\n" for text in (about, said) if text) + filled.lstrip()


def sizes(spec: TensorSpec) -> tuple[int, ...]:
    """Return sizes that a file takes: one sample, and an example for whatever else is free."""
    return tuple(size if isinstance(size, int) else _FREE[place > 0] for place, size in enumerate(spec.shape))


def _free(spec: TensorSpec, mark: str) -> str:
    named = [str(size) for size in spec.shape if isinstance(size, str)]
    return f"  {mark} free: {plain(', '.join(named))}" if named else ""
