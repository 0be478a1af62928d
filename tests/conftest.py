"""Fixed seeds and one thread for every test; hypothesis draws the same examples in every run."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
