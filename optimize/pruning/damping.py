"""How far the covariances of a layer's inputs are to be trusted: as far as one half of the data speaks for the other.

Few samples, alike within a picture, say little of hundreds of columns: least squares then makes up for channels on
those samples alone (a thousandth of the outputs lost on 30 pictures, an eighth on others). Damping ``d`` adds ``d``
times the variance of each column to it; nothing is made up for where it is large. With the one that is taken, weights
solved on one half lose about the least on the other.

Source: cross-validated ridge regression, A. E. Hoerl, R. W. Kennard, "Ridge Regression", 1970.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optimize.quantization.rounding import InputMoments

_TRIED = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
#: The least damping is taken that loses hardly more than the best: the whole of the data says more than a half.
_AS_GOOD = 1.02
#: Where there is no other half: by columns for each that was seen.
_UNSEEN = 0.1


@dataclass(frozen=True)
class Columns:
    """What is known of the columns that a layer's rows of ``K`` weights are multiplied with, float64.

    Attributes:
        count: How many there were.
        samples: Of how many samples.
        mean: ``[K]``.
        covariance: ``[K, K]``.
    """

    count: int
    samples: int
    mean: torch.Tensor
    covariance: torch.Tensor

    @classmethod
    def of(cls, moments: InputMoments, samples: int) -> Columns:
        """Return what sums over the columns of a layer of one group say."""
        covariance = moments.covariance[0].double() * moments.unit[0].double()
        return cls(moments.count, samples, moments.mean[0].double(), covariance)

    def damped(self, damping: float, *, shifted: bool) -> torch.Tensor:
        """Return the covariance, or the products where nothing takes the mean back, with a grown diagonal ``[K, K]``.

        What is silent on ``n`` samples may speak on the next: every column has an ``n``-th of the mean variance.
        """
        products = self.about(self.mean if shifted else torch.zeros_like(self.mean))
        diagonal = products.diagonal().clamp(min=0)
        floor = max(_TRIED[0], 1 / max(self.samples, 1)) * diagonal.mean().clamp(min=1e-30)
        return products + torch.diag(damping * diagonal + floor)

    def about(self, point: torch.Tensor) -> torch.Tensor:
        """Return the mean of the columns' outer products with a point taken off, ``[K, K]``."""
        away = self.mean - point
        return torch.addr(self.covariance, away, away)

    def joined(self, other: Columns) -> Columns:
        """Return what is known of both."""
        count = self.count + other.count
        mean = (self.count * self.mean + other.count * other.mean) / count
        products = (self.count * self.about(mean) + other.count * other.about(mean)) / count
        return Columns(count, self.samples + other.samples, mean, products)


def choose_damping(halves: list[Columns], rows: torch.Tensor, gone: torch.Tensor, *, shifted: bool) -> float:
    """Return the damping with which weights that make up for some columns lose least on data they were not solved on.

    Args:
        halves: Of the data; where there is one alone, the damping grows with the columns for each that was seen.
        rows: Weights, float64 ``[C_out, K]``.
        gone: Which columns go in the trial, bool ``[K]``.
        shifted: Whether something takes the mean back.
    """
    if len(halves) < 2 or gone.all() or not gone.any():
        return _TRIED[0] + _UNSEEN * rows.shape[1] / max(halves[0].count, 1)
    losses = torch.zeros(len(_TRIED), dtype=torch.float64)
    for one, other in (halves, halves[::-1]):
        point = one.mean if shifted else torch.zeros_like(one.mean)
        held_out = other.about(point)
        for place, damping in enumerate(_TRIED):
            seen = one.damped(damping, shifted=shifted)
            solved = torch.linalg.solve(seen[~gone][:, ~gone], seen[~gone][:, gone] @ rows[:, gone].T).T
            change = torch.zeros_like(rows)
            change[:, gone], change[:, ~gone] = -rows[:, gone], solved
            losses[place] += ((change @ held_out) * change).sum()
    return next(damping for damping, loss in zip(_TRIED, losses, strict=True) if loss <= _AS_GOOD * losses.min())
