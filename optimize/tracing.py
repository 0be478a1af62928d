"""What a trace of torch's need not do: run recurrent layers step by step, look up operators, note lines of Python.

torch computes the shapes of an LSTM, a GRU or a plain recurrent layer by running its steps one by one in Python: that
takes 12 seconds for 32 of them, and the number of steps becomes a constant. What they return does not need to be run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._decomp import decomposition_table
from torch._export import utils
from torch.fx import config as fx_config

from optimize.graph import aten


@contextlib.contextmanager
def shape_rules(*operators: Any) -> Iterator[None]:
    """Let torch know the shapes of recurrent layers by their rules, wherever it computes with shapes alone.

    Args:
        operators: Those whose rules it shall know; all without. What takes one apart must not: the rule has no numbers.
    """
    rules = {operator: rule for operator, rule in _RULES.items() if not operators or operator in operators}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(decomposition_table, rules))
        for operator, rule in rules.items():
            stack.enter_context(mock.patch.dict(operator.py_kernels, dict.fromkeys(operator.py_kernels, rule)))
            stack.callback(operator._dispatch_cache.clear)
            operator._dispatch_cache.clear()
        yield


def _shape_lstm(x: torch.Tensor, states: Sequence[torch.Tensor], *rest: Any) -> tuple[torch.Tensor, ...]:
    """Return values of an LSTM's shapes: outputs ``[N, T, D * H]`` or ``[T, N, D * H]``, and its states."""
    hidden, cell = states
    return _shape_outputs(x, hidden, rest), torch.empty_like(hidden), torch.empty_like(cell)


def _shape_rnn(x: torch.Tensor, hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Return values of the shapes of a GRU or a plain recurrent layer."""
    return _shape_outputs(x, hidden, rest), torch.empty_like(hidden)


def _shape_outputs(x: torch.Tensor, hidden: torch.Tensor, rest: Sequence[Any]) -> torch.Tensor:
    bidirectional = rest[5]
    return x.new_empty((*x.shape[:-1], hidden.shape[-1] * (2 if bidirectional else 1)))


_RULES: dict[Any, Any] = {
    aten.lstm.input: _shape_lstm,
    aten.gru.input: _shape_rnn,
    aten.rnn_tanh.input: _shape_rnn,
    aten.rnn_relu.input: _shape_rnn,
}


_LOOK_UP = "_materialize_cpp_cia_ops"


@contextlib.contextmanager
def light_traces() -> Iterator[None]:
    """Let torch look its composite operators up once inside the block, where nobody registers any.

    Nor does it write beside each node the lines of Python that led there, which nobody reads: a tenth of a trace.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fx_config, "do_not_emit_stack_traces", True, create=True))
        if look_up := getattr(utils, _LOOK_UP, None):  # else a torch that does it in another way
            stack.enter_context(mock.patch.object(utils, _LOOK_UP, functools.cache(look_up)))
        yield
