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
#: What makes an input of a picture, where ``--preprocess`` says it in words.
_PICTURE = """\
from PIL import Image

def prepared(picture):
    picture = picture.convert($mode)
    w, h = picture.size
    w, h = $resized
    left, top = round((w - $width) / 2), round((h - $height) / 2)
    picture = picture.resize((w, h), Image.Resampling.$method).crop((left, top, left + $width, top + $height))
    x = numpy.asarray(picture).reshape(1, $height, $width, $channels)
$steps    return x.astype($dtype)
"""
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
    said = f"its first input is a picture: {preprocess}" if preprocess else ""
    if target.alone and types <= _NUMPY:
        lines = [f"# {plain(text)}" for text in (about, said) if text]
        picture = _picture(inputs[0], preprocess or "") if inputs else ""
        values = [f"numpy.zeros({sizes(spec)}, {spec.dtype!r}),{_free(spec, '#')}" for spec in inputs]
        if picture:
            values[0] = "prepared(Image.new('RGB', (640, 480))),  # Image.open('picture.jpg'), say"
        feeds = [f"    {json.dumps(spec.name)}: {value}" for spec, value in zip(inputs, values, strict=True)]
        names = json.dumps([spec.name for spec in outputs])
        shown = [f"for name, value in zip({names}, f(*inputs.values())):", "    print(name, value.dtype, value.shape)"]
        given = [f"path = {json.dumps(name)}", target.alone.strip(), "", "inputs = {", *feeds, "}", *shown]
        yield "Python", "\n".join([*lines, "import numpy", *([picture] if picture else [""]), *given]) + "\n"
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


def _picture(spec: TensorSpec, said: str) -> str:
    """Return what makes an input of a picture; empty where that is code, or none of what ``--preprocess`` writes."""
    words = dict(part.partition("=")[::2] for part in said.split())
    try:
        cut, resized = (tuple(map(int, words[word].split("x"))) for word in ("size", "resize"))
        mean, std = (list(map(float, filter(None, words.get(word, "").split(",")))) for word in ("mean", "std"))
    except (KeyError, ValueError):
        return ""
    is_last, side = not mean, resized[0]  # a file that takes pixels takes their channels last
    channels = spec.shape[-1 if is_last else 1] if len(spec.shape) == 4 else 0
    if channels not in (1, 3) or not re.fullmatch("[a-z]+", words.get("interpolation", "")):
        return ""
    short = f"({side}, {side} * h // w) if w <= h else ({side} * w // h, {side})"
    steps = {
        "x = x[..., ::-1]": words.get("order") == "bgr",
        f"x = (x / 255 - {mean}) / {std}": mean and spec.dtype != "uint8",
        "x = x.transpose(0, 3, 1, 2)": not is_last,
    }
    return Template(_PICTURE).substitute(
        mode=repr("L" if channels == 1 else "RGB"),
        resized=str(resized[::-1]) if len(resized) == 2 else short,
        height=cut[0],
        width=cut[-1],
        channels=channels,
        method=words["interpolation"].upper(),
        steps="".join(f"    {step}\n" for step, is_done in steps.items() if is_done),
        dtype=repr(spec.dtype),
    )


def sizes(spec: TensorSpec) -> tuple[int, ...]:
    """Return sizes that a file takes: one sample, and an example for whatever else is free."""
    return tuple(size if isinstance(size, int) else _FREE[place > 0] for place, size in enumerate(spec.shape))


def _free(spec: TensorSpec, mark: str) -> str:
    named = [str(size) for size in spec.shape if isinstance(size, str)]
    return f"  {mark} free: {plain(', '.join(named))}" if named else ""
