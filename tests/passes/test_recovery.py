"""What every recovery pass does: it is kept where held-out answers gain enough, and says by how much."""

import re

import pytest
import torch
from torch import nn

import optimize
from optimize.passes import recovery
from optimize.passes.equalize_channels import EqualizeChannels
from tests.passes.test_equalize_channels import chain, images, unequal


def test_a_gain_below_the_margin_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = chain(nn.ReLU()).eval()
    unequal(net[0], net[2])
    program, entry = optimize.capture(net, (images(2),)), EqualizeChannels([images(16, 0), images(16, 1)])
    figures = re.compile(r"activations and weights rounded: ([\d.]+) dB before, ([\d.]+) dB after\.")
    kept = entry.apply(program)[1]
    (found,) = figures.findall(kept.notes[0])
    before, after = map(float, found)
    assert len(kept.rewrites) == 1 and after > before + recovery.MARGIN_DB
    monkeypatch.setattr(recovery, "MARGIN_DB", after - before + 0.2)
    unchanged, outcome = entry.apply(program)
    assert unchanged is program and not outcome.rewrites
    assert outcome.notes[0].startswith("Left out") and figures.findall(outcome.notes[0]) == [found]
