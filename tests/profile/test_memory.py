"""The peak of live activations by hand."""

import torch
from torch import nn

import optimize
from optimize.profile.result import live_memory
from tests.profile.nets import block


class Chain(nn.Module):
    """Widens to four times its input, through a view, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).unsqueeze(2).relu().squeeze(2))


def test_a_chain_by_hand() -> None:
    found = live_memory(optimize.capture(Chain().eval(), (torch.randn(2, 4),)), batch=3)
    live = list(found.live_bytes.values())
    # the input lives throughout; a view keeps what it looks at; the activation is beside its input
    assert live == [4 * 3 * each for each in (4 + 16, 4 + 16, 4 + 16 + 16, 4 + 16, 4 + 16 + 2)]
    assert (found.peak_bytes, found.peak_node) == (4 * 3 * 36, "relu")
    assert found.weight_bytes == 4 * (4 * 16 + 16 + 16 * 2 + 2)


def test_a_skip_stays_alive_until_it_is_added() -> None:
    found = live_memory(block(), batch=1)
    maps, given = 4 * 16 * 8 * 8, 4 * 3 * 8 * 8
    assert found.live_bytes["conv2d"] == given + maps
    assert found.live_bytes["add"] == given + 3 * maps  # the skip, the convolution's result and the sum
    assert found.peak_bytes == given + 3 * maps
    assert live_memory(block(), batch=4).peak_bytes == 4 * found.peak_bytes
