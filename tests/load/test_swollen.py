from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.errors import Refused
from tests.load.files import load


def test_a_small_file_whose_weight_claims_terabytes_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.zeros(1, 1).expand(10**6, 10**6), requires_grad=False)
    path = tmp_path / "swollen.pt"
    torch.save(net, path)
    assert path.stat().st_size < 10_000
    with pytest.raises(Refused, match="4000000000000 bytes"):
        load(path)
