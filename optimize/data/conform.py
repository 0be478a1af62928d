"""Making a batch fit the inputs of a model: shape and dtype checked, values kept, refusals name the sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from optimize.errors import Refused, UsageError

#: Numbers that are read at once, 64 MB in float32: what is read is converted, and looked through.
_MOST_AT_ONCE = 2**24
_OTHER_LABELS = "What else labels may be, --metric says: mae, spearman, map, wer, package.module:callable."
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


@dataclass(frozen=True)
class InputSpec:
    """One input of a model.

    Attributes:
        name: As the model names it.
        shape: Without the batch; None for a free dimension.
        dtype: As torch names it: ``"float32"``, ``"int64"``.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        return getattr(torch, self.dtype)

    @property
    def is_picture(self) -> bool:
        """Whether it takes pictures as decoders give them: uint8 ``[H, W, C]`` in RGB, or of grey."""
        shape = self.shape
        return self.dtype == "uint8" and len(shape) == 3 and shape[2] in (1, 3) and shape[0] not in (1, 3)


@dataclass(frozen=True)
class Batch:
    """Samples that go through the model together.

    Attributes:
        inputs: One tensor an input of the model, each ``[N, ...]``, in its order.
        labels: ``[N]`` or ``[N, ...]``, of int64 or a float type, or an array of texts; None where there are none.
    """

    inputs: tuple[torch.Tensor, ...]
    labels: torch.Tensor | np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, part: slice | list[int]) -> Batch:
        return Batch(tuple(value[part] for value in self.inputs), None if self.labels is None else self.labels[part])

    @property
    def wanted(self) -> np.ndarray | None:
        """The labels as an array."""
        return self.labels.numpy() if isinstance(self.labels, torch.Tensor) else self.labels


def samples_at_once(numbers: int, most: int) -> int:
    """Return how many samples of so many numbers each are read together: ``most`` where they are small.

    >>> samples_at_once(3 * 224 * 224, 256), samples_at_once(3 * 4096 * 4096, 256)
    (111, 1)
    """
    return max(1, min(most, _MOST_AT_ONCE // max(numbers, 1)))


def conform(arrays: Sequence[Any], labels: Any, specs: Sequence[InputSpec], name: str, start: int) -> Batch:
    """Turn arrays into a batch that fits the inputs.

    Args:
        arrays: One array or tensor an input.
        labels: Numbers or texts, the first axis over samples, or None.
        specs: What the model takes.
        name: What to call the data in an error.
        start: Number of the first sample, for errors.

    Raises:
        Refused: Shapes, counts, dtypes or values do not fit; the message says what was got and expected.
    """
    inputs = tuple(_input(value, spec, name, start) for value, spec in zip(arrays, specs, strict=True))
    checked = None if labels is None else _labels(labels, name)
    lengths = {spec.name: len(value) for spec, value in zip(specs, inputs, strict=True)}
    require_aligned(lengths | ({} if checked is None else {"labels": len(checked)}), name)
    return Batch(inputs, checked)


def require_aligned(lengths: Mapping[str, int], name: str) -> None:
    """Refuse arrays of one batch, or one file, that have different numbers of samples; ``lengths`` by their names."""
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{count} of '{key}'" for key, count in lengths.items())
        hint = "Row n of each array is of sample n: give all of them as many rows."
        raise Refused(f"'{name}' has different numbers of samples: {listed}.", hint=hint)


def as_tensor(value: Any, what: str) -> torch.Tensor:
    """Return an array, tensor or list of numbers as a tensor without copying where possible.

    Raises:
        Refused: It holds something else than numbers.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise Refused(f"{what} is a sparse tensor.", hint="Give it as a dense one: to_dense().")
        if value.is_meta or value.is_quantized or value.is_nested:
            kind = "without values" if value.is_meta else "quantized" if value.is_quantized else "nested"
            raise Refused(f"{what} is a tensor that is {kind}.", hint="Give one of plain numbers.")
        return value.detach().cpu()
    if np.ma.is_masked(value):
        raise Refused(f"{what} is masked: a model takes every number.", hint="Fill it first: x.filled(0).")
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise Refused(f"{what} has the dtype {array.dtype}, not numbers a model takes.")
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def check_shape(shape: Sequence[int], spec: InputSpec, name: str) -> None:
    """Refuse a shape ``[N, ...]`` that does not fit an input.

    Raises:
        Refused: It does not fit; hints at images in the other order and a missing batch dimension.
    """
    sample = tuple(shape[1:])
    if len(shape) and _fits(sample, spec.shape):
        return
    expected = "[N, " + ", ".join("any" if size is None else str(size) for size in spec.shape) + "]"
    hint = ""
    if len(sample) >= 3 and _fits((sample[-1], *sample[:-1]), spec.shape):
        hint = "This looks channels-last (NHWC); the model takes NCHW: transpose with x.transpose(0, 3, 1, 2)."
    elif spec.is_picture and _fits((*sample[1:], *sample[:1]), spec.shape):
        hint = (
            "Give pictures as they leave the decoder: uint8, not normalised, channels last (x.transpose(0, 2, 3, 1))."
        )
    elif _fits(tuple(shape), spec.shape):
        hint = "This looks like a single sample without the batch dimension: use x[None]."
    raise Refused(
        f"'{name}' has the shape {list(shape)} for input '{spec.name}', which takes {expected.replace(', ]', ']')}.",
        hint=hint,
    )


def _fits(sample: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(sample) == len(shape) and all(
        want is None or got == want for got, want in zip(sample, shape, strict=True)
    )


def _input(value: Any, spec: InputSpec, name: str, start: int) -> torch.Tensor:
    tensor = as_tensor(value, f"'{name}' for input '{spec.name}'")
    check_shape(tensor.shape, spec, name)
    cast = _cast(tensor, spec, name)
    if cast.is_floating_point():
        finite = torch.isfinite(cast).flatten(1).all(1) if cast.dim() > 1 else torch.isfinite(cast)
        if not bool(finite.all()):
            sample = int((~finite).nonzero()[0])
            bad = "NaN" if bool(torch.isnan(cast[sample]).any()) else "an infinity"
            raise Refused(f"'{name}' has {bad} in sample {start + sample} of input '{spec.name}' (as {spec.dtype}).")
    return cast


def _cast(tensor: torch.Tensor, spec: InputSpec, name: str) -> torch.Tensor:
    """Cast without changing values beyond rounding of floats; uint8 for a float input is scaled to [0, 1]."""
    want = spec.torch_dtype
    tensor = _signed(tensor, f"'{name}' for input '{spec.name}'")
    if tensor.dtype == want:
        return tensor
    if tensor.dtype == torch.uint8 and want.is_floating_point:
        return (tensor.to(torch.float32) / 255).to(want)
    if tensor.is_complex() or (tensor.is_floating_point() and not want.is_floating_point):
        raise UsageError(
            f"'{name}' holds {_noun(tensor)} for input '{spec.name}', which takes {spec.dtype}.",
            hint="Give it in that dtype.",
        )
    cast = tensor.to(want)
    if not tensor.is_floating_point() and not torch.equal(cast.to(torch.int64), tensor.to(torch.int64)):
        raise UsageError(
            f"'{name}' holds {_noun(tensor)} values for input '{spec.name}' that {spec.dtype} cannot hold."
        )
    return cast


def _signed(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return unsigned integers as signed ones that hold them.

    Raises:
        Refused: 64 bits do not.
    """
    wide = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
    if tensor.dtype is torch.uint64 and bool((wide < 0).any()):
        raise Refused(f"{name} holds integers of 2^63 and more, which int64 does not.")
    return wide


def _labels(value: Any, name: str) -> torch.Tensor | np.ndarray:
    """Return labels as they are, integers as int64, and ``[N, 1]`` as ``[N]``."""
    try:
        texts = None if isinstance(value, torch.Tensor) else np.asarray(value)
    except ValueError:  # NumPy's, of lists that are not of one length
        texts = np.empty(0, object)
    if texts is not None and texts.dtype.kind == "O":
        raise Refused(
            f"The labels of '{name}' are objects, or of different sizes from sample to sample, and not one array.",
            hint="Pad them to one size: boxes to [N, G, 5], x1, y1, x2, y2 and a class, which is negative for padding.",
        )
    labels = texts if texts is not None and texts.dtype.kind == "U" else as_tensor(value, f"The labels of '{name}'")
    if not labels.ndim:
        raise Refused(f"The labels of '{name}' are a single number, not one a sample.")
    if isinstance(labels, torch.Tensor) and not (labels.is_floating_point() or labels.dtype == torch.bool):
        labels = _signed(labels, f"'{name}' in its labels").to(torch.int64)
    return labels.squeeze(1) if labels.ndim == 2 and labels.shape[1] == 1 else labels


def require_classes(labels: torch.Tensor | np.ndarray | None, name: str, start: int) -> None:
    """Check that labels are numbers of classes.

    Raises:
        UsageError: They are of another type.
        Refused: One is negative; it is named.
    """
    if labels is None:
        return
    if not isinstance(labels, torch.Tensor):
        raise UsageError(f"The labels of '{name}' are texts, not numbers of classes.", hint=_OTHER_LABELS)
    if labels.dtype != torch.int64:
        raise UsageError(
            f"The labels of '{name}' are {_noun(labels)}; they must be class numbers (integers).",
            hint=f"One-hot labels become class numbers with y.argmax(1). {_OTHER_LABELS}",
        )
    negative = (labels < 0).flatten(1).any(1) if labels.dim() > 1 else labels < 0
    if bool(negative.any()):
        sample = int(negative.nonzero()[0])
        raise Refused(f"'{name}' has a negative label for sample {start + sample}; classes count from 0.")


def _noun(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
