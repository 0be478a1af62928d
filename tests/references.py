"""The reference networks as programs, each captured once a process for all the tests that begin with it."""

import functools
from typing import Any

from torch import nn

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize.program import Program
from tests.slow import but_slowly

#: Their operators are those of diverse_branch: branches of convolutions and norms.
SAME = {"acnet", "repvgg"}
#: They have no BatchNorm: any statistics make the same network.
PLAIN = {"lstm", "vit"}


def network(name: str, statistics: int | None = 1) -> nn.Module:
    """Return a reference network, its BatchNorms drawn from a seed; None leaves them as they are built."""
    net = REFERENCES[name].build()
    if statistics is not None:
        randomize_batch_norm(net, statistics)
    return net


def each(*fast: str) -> list[Any]:
    """Return the names of all as parameters, those that are not named for slow tests."""
    return but_slowly(sorted(REFERENCES), REFERENCES.keys() - fast)


def captured(name: str, statistics: int | None = 1) -> Program:
    """Return ``network`` captured, nothing of it shared with what anybody else was given."""
    return _captured(name, None if name in PLAIN else statistics).clone()


def folded(name: str, statistics: int | None = 1) -> Program:
    """Return ``captured``, BatchNorms folded and then branches merged: those of diverse_branch stay so."""
    return _folded(name, None if name in PLAIN else statistics).clone()


def int8(name: str, *, spare: float = 0.06) -> Program:
    """Return ``folded`` with an INT8 plan of noise."""
    return _int8(name, spare).clone()


@functools.cache
def _captured(name: str, statistics: int | None) -> Program:
    return optimize.capture(network(name, statistics), (REFERENCES[name].inputs(2),))


@functools.cache
def _folded(name: str, statistics: int | None) -> Program:
    passes = [optimize.FuseConvBN(), optimize.Reparameterize()]
    return optimize.Pipeline(passes).run(_captured(name, statistics)).program


@functools.cache
def _int8(name: str, spare: float) -> Program:
    data = [REFERENCES[name].inputs(8, seed) for seed in (1, 2)]
    return optimize.QuantizeStatic(calibration=data, calibrator="minmax", spare=spare).apply(folded(name))[0]
