"""Computing on rounded values: what does not take them is said."""

import pytest
import torch
from torch import nn

import optimize
from optimize.errors import Refused
from optimize.precision.emulation import Emulation


class Table(nn.Module):
    """Looks up rows by an index that it computes from a real number."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1000, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows[(x * 1000).long()]


def test_an_index_that_rounding_moves_out_of_its_table_is_said() -> None:
    x = torch.tensor([0.25, 0.9998])  # in bfloat16 the second is 1
    emulation = Emulation(optimize.capture(Table().eval(), (x,)), torch.bfloat16)
    torch.testing.assert_close(emulation.outputs([x], [])[0], emulation.program(x))
    with pytest.raises(Refused, match="cannot be computed from rounded values: index 1000 is out of bounds") as caught:
        emulation.outputs([x], emulation.calls)
    assert "--keep" in caught.value.hint
