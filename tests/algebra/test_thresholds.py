import pytest
import torch

from optimize.algebra.monotone import first_true


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_first_number_is_found_to_the_bit(dtype: torch.dtype) -> None:
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    bounds = torch.tensor([-largest, -3.7, -smallest, -smallest / 2, 0, smallest / 2, 1e-3, 1, largest], dtype=dtype)
    assert torch.equal(
        first_true(lambda x: x > bounds, 9, dtype)[:8], bounds[:8].nextafter(torch.tensor(largest, dtype=dtype))
    )
    at_least = first_true(lambda x: x >= bounds, 9, dtype)
    assert torch.equal(at_least[1:], bounds[1:]) and at_least[0] == -torch.inf


def test_conditions_that_never_or_always_hold() -> None:
    never = first_true(lambda x: torch.zeros_like(x, dtype=torch.bool), 2, torch.float32)
    always = first_true(lambda x: torch.ones_like(x, dtype=torch.bool), 2, torch.float32)
    assert never.tolist() == [torch.inf] * 2 and always.tolist() == [-torch.inf] * 2
