import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.errors import Refused
from optimize.load import taking
from optimize.load.identify import Kind
from optimize.load.taking import take_over
from optimize.sandbox import Answer
from tests.load.files import load


def test_a_small_file_whose_weight_claims_terabytes_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.weight = nn.Parameter(torch.zeros(1, 1).expand(10**6, 10**6), requires_grad=False)
    path = tmp_path / "swollen.pt"
    torch.save(net, path)
    assert path.stat().st_size < 10_000
    with pytest.raises(Refused, match="4000000000000 bytes"):
        load(path)


def test_a_small_file_whose_state_dict_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    """Each of several views may be a little larger than what is stored, all of them together may not."""
    one = {"0.weight": torch.zeros(1, 1).expand(10**5, 10**5)}
    several = {f"{place}.weight": torch.zeros(1).expand(10**7) for place in range(4)}
    for state in (one, several, {"state_dict": several, "epoch": 3}):
        torch.save(state, path := tmp_path / "swollen.pt")
        with pytest.raises(Refused, match=r"holds a weight '\d.weight' of \d+ bytes, with which"):
            take_over(path, Kind.CHECKPOINT, tuple)


@pytest.mark.parametrize("views", [1, 4])
def test_a_small_program_whose_weights_claim_gigabytes_together_is_refused(views: int, tmp_path: Path) -> None:
    """Each is broadcast from four bytes, to 40 MB: one may be, all of them together may not."""

    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for place in range(views):
                self.register_buffer(f"part{place}", torch.zeros(1).expand(10**7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + sum(part[0] for part in self.buffers())

    torch.export.save(torch.export.export(Broadcast().eval(), (torch.zeros(2, 4),)), path := tmp_path / "swollen.pt2")
    assert path.stat().st_size < 100_000
    with contextlib.nullcontext() if views == 1 else pytest.raises(Refused, match="has 10000000 values and 4 bytes"):
        load(path)


def test_layers_that_share_weights_are_taken(tmp_path: Path) -> None:
    shared = torch.rand(10**6)
    torch.save({f"{place}.weight": shared.view(100, -1) for place in range(12)}, path := tmp_path / "tied.pt")
    assert len(take_over(path, Kind.CHECKPOINT, tuple).state or {}) == 12


def test_a_child_that_leaves_more_weights_than_the_file_holds_is_not_believed(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, path := tmp_path / "small.pt")
    with (tmp_path / "state.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    answer = Answer({"held": "state", "noun": "state dict", "warnings": []}, ())
    with pytest.raises(Refused, match="left an answer that is not read"):
        taking._taken(path, tmp_path, answer)
