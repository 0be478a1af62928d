"""torch's composite operators: every trace looks all of them up for each of its namespaces, a third of a small one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from torch._export import utils

_LOOK_UP = "_materialize_cpp_cia_ops"


@contextlib.contextmanager
def looked_up_once() -> Iterator[None]:
    """Let torch look its composite operators up once inside the block, where nobody registers any."""
    look_up = getattr(utils, _LOOK_UP, None)
    if look_up is None:  # a torch that does it in another way
        yield
        return
    with mock.patch.object(utils, _LOOK_UP, functools.cache(look_up)):
        yield
