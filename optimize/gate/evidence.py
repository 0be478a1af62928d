"""Evidence that may be looked at after every round: e-values of signs.

A round says one thing: whether the candidate's block took longer than a threshold times the base's. If the median of
the ratio is at the threshold or below, the sign is "longer" with probability one half at most. A gambler who bets the
share ``2p - 1`` of a stake of one on "longer" in every round owns ``(2p)^k (2 - 2p)^(n - k)`` after ``k`` of ``n``: a
non-negative supermartingale, and so is the mean over several ``p``. By Ville's inequality it ever reaches ``1 / alpha``
with probability ``alpha`` at most, so that measuring may stop at any time for any reason.

Peter Gruenwald, Rianne de Heide, Wouter Koolen, "Safe testing", arXiv:1906.07801; Michael Lindon, Chris Sanden, Vache
Shirikian, "Rapid regression detection in software deployments through sequential testing", KDD 2022, arXiv:2205.14762.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: The probabilities that are bet on, 0.52 to 0.98: near one half finds small effects, near one ends soon.
BETS = np.arange(26, 50) / 50


def e_value(successes: npt.ArrayLike, rounds: npt.ArrayLike) -> np.ndarray:
    """Return the evidence that a sign is positive more often than not, for arrays of any one shape.

    Args:
        successes: Positive signs.
        rounds: All signs.

    >>> [int(e_value(n, n)) for n in (9, 10)], int(e_value(20, 40))
    ([96, 173], 0)
    """
    won = np.asarray(successes, np.float64)[..., None]
    lost = np.asarray(rounds, np.float64)[..., None] - won
    # A sum of exponentials: 2^rounds stays far below the largest float for any number of rounds a budget allows.
    wealth: np.ndarray = np.exp(won * np.log(2 * BETS) + lost * np.log(2 * (1 - BETS))).mean(-1)
    return wealth
