"""What torch looks up anew for each namespace and each export is looked up once, and found as ever afterwards."""

import pytest
import torch
from torch._export import utils

from optimize.tracing import light_traces
from tests import references


def test_composite_operators_are_looked_up_once_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, look_up = [], utils._materialize_cpp_cia_ops
    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", lambda: seen.append(look_up()))
    before = utils._collect_all_valid_cia_ops()
    assert len(seen) > 2 and torch.ops.aten.linear.default in before
    seen.clear()
    with light_traces():
        assert utils._collect_all_valid_cia_ops() == before
        assert len(seen) == 1
    utils._collect_all_valid_cia_ops()
    assert len(seen) > 3


def test_no_line_of_python_is_noted_beside_a_node() -> None:
    nodes = references.captured("resnet").graph.nodes
    assert len(nodes) > 20 and not any(node.stack_trace for node in nodes)
