"""What a network is taught by: labels, and what a teacher makes of the same samples.

Widths of student and teacher may differ, as after pruning, for all but ``Features``: none has weights of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from optimize.errors import UsageError


@dataclass(frozen=True)
class Lesson:
    """What student and teacher made of one batch.

    Attributes:
        outputs: What the student returned, the first tensor of it ``[N, ...]``.
        labels: What the data says ``[N, ...]``; None where it holds inputs alone.
        taught: What the teacher returned, like ``outputs``; None without one.
        inner: Outputs of the student's modules, by name.
        shown: Outputs of the teacher's modules, by name.
    """

    outputs: Tensor
    labels: Any = None
    taught: Tensor | None = None
    inner: Mapping[str, Tensor] = field(default_factory=dict)
    shown: Mapping[str, Tensor] = field(default_factory=dict)

    def answer(self) -> Tensor:
        """Return the teacher's outputs.

        Raises:
            UsageError: There is no teacher.
        """
        if self.taught is None:
            raise UsageError("A loss compares with a teacher, and none was given.", hint="Training(teacher=...).")
        return self.taught


class Loss(Protocol):
    """A loss of a batch; the sum of all is made small.

    Attributes:
        layers: Modules of the student whose outputs it reads, each with the teacher's that it is compared with.
    """

    @property
    def layers(self) -> Mapping[str, str]:
        """As above."""

    def __call__(self, lesson: Lesson) -> Tensor:
        """Return a number, differentiable by the student's outputs."""


@dataclass(frozen=True)
class Labels:
    """Cross-entropy with labels.

    Attributes:
        weight: In the sum of losses.
        smoothing: Share of the target that all classes get evenly.
    """

    weight: float = 1.0
    smoothing: float = 0.0
    layers: Mapping[str, str] = field(default_factory=dict, init=False)

    def __call__(self, lesson: Lesson) -> Tensor:
        """Return the mean over samples, for logits ``[N, classes, ...]`` and labels ``[N, ...]``.

        Raises:
            UsageError: The data holds no labels.
        """
        if lesson.labels is None:
            raise UsageError("The data holds no labels.", hint="Give pairs of inputs and labels, or leave Labels out.")
        labels = lesson.labels if lesson.labels.is_floating_point() else lesson.labels.long()
        return self.weight * functional.cross_entropy(lesson.outputs, labels, label_smoothing=self.smoothing)


@dataclass(frozen=True)
class Logits:
    """The teacher's distribution over classes, both softened (G. Hinton et al., 2015, arXiv 1503.02531).

    ``T^2 * KL(softmax(t/T) || softmax(s/T))``, the mean over samples: gradients keep their size whatever ``T``.

    Attributes:
        weight: In the sum of losses.
        temperature: ``T``.
    """

    weight: float = 1.0
    temperature: float = 4.0
    layers: Mapping[str, str] = field(default_factory=dict, init=False)

    def __call__(self, lesson: Lesson) -> Tensor:
        """Return the loss for logits ``[N, classes, ...]``."""
        student, teacher = (
            functional.log_softmax(logits / self.temperature, 1) for logits in (lesson.outputs, lesson.answer())
        )
        apart = functional.kl_div(student, teacher, reduction="sum", log_target=True)
        return self.weight * self.temperature**2 * apart / (student.numel() / student.shape[1])


@dataclass(frozen=True)
class LayerLoss(ABC):
    """Base of losses that compare values of layers; the mean over them.

    Attributes:
        layers: Modules of the student, each with the teacher's, of values ``[N, ...]``.
        weight: In the sum of losses.
    """

    layers: Mapping[str, str]
    weight: float = 1.0

    def __call__(self, lesson: Lesson) -> Tensor:
        """Return the mean over the layers.

        Raises:
            UsageError: Two of them cannot be compared so.
        """
        found = [self.apart(lesson.inner[own], lesson.shown[others]) for own, others in self.layers.items()]
        return self.weight * torch.stack(found).mean()

    @abstractmethod
    def apart(self, value: Tensor, wanted: Tensor) -> Tensor:
        """Return how far the values of a layer are from the teacher's, a number."""


@dataclass(frozen=True)
class Features(LayerLoss):
    """Mean squared difference of inner values of equal shapes, over the teacher's mean square."""

    def __call__(self, lesson: Lesson) -> Tensor:
        """Return the mean over the layers.

        Raises:
            UsageError: Shapes differ.
        """
        for own, others in self.layers.items():
            shapes = list(lesson.inner[own].shape), list(lesson.shown[others].shape)
            if shapes[0] != shapes[1]:
                hint = "Similarity and Attention compare layers of any width."
                told = f"{shapes[0]} and {shapes[1]}"
                raise UsageError(f"'{own}' and the teacher's '{others}' have shapes {told}.", hint=hint)
        return super().__call__(lesson)

    def apart(self, value: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean square of the difference over that of the teacher's."""
        return (value - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)


@dataclass(frozen=True)
class Attention(LayerLoss):
    """Where a layer is active: the mean square over channels at each place (S. Zagoruyko, N. Komodakis, 2017,
    arXiv 1612.03928), maps of length 1. Values are ``[N, channels, ...]``, of the same places.
    """

    def apart(self, value: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean squared distance of the maps, over samples.

        Raises:
            UsageError: A layer has no places, but channels alone.
        """
        return (_map(value) - _map(wanted)).square().sum(1).mean()


@dataclass(frozen=True)
class Similarity(LayerLoss):
    """Which samples of a batch a layer finds alike (F. Tung, G. Mori, 2019, arXiv 1907.09682)."""

    def apart(self, value: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean squared difference of the rows' cosines with each other."""
        return (_alike(value) - _alike(wanted)).square().mean()


def _map(value: Tensor) -> Tensor:
    """Return ``[N, places]`` of unit length."""
    if value.dim() < 3:
        raise UsageError(f"Values of shape {list(value.shape)} have no places.", hint="Similarity compares them.")
    return functional.normalize(value.float().square().mean(1).flatten(1), dim=1)


def _alike(value: Tensor) -> Tensor:
    """Return ``[N, N]``, rows of unit length."""
    flat = value.float().flatten(1)
    return functional.normalize(flat @ flat.T, dim=1)
