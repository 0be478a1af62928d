"""Kernels find their calls by what they claim and by the flow of data."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from optimize.targets.probe import Calls, align, attribute, calls_of
from tests.profile.nets import block

CHAIN = Calls(
    {
        "conv": (),
        "norm": ("conv",),
        "relu": ("norm",),
        "conv_1": ("relu",),
        "add": ("conv_1", "relu"),
        "flat": ("add",),
    },
    frozenset({"conv", "conv_1"}),
)


def test_the_name_of_an_activation_stands_for_the_layer_before_it() -> None:
    assert attribute(CHAIN, [("relu",), ("conv_1",), ()]) == [("conv", "norm", "relu"), ("conv_1", "add", "flat"), ()]


def test_an_activation_on_its_own_takes_no_layer_that_has_a_kernel() -> None:
    assert attribute(CHAIN, [("conv",), ("relu",), ("conv_1",)]) == [
        ("conv", "norm"),
        ("relu",),
        ("conv_1", "add", "flat"),
    ]


def test_what_stands_in_front_of_the_first_layer_belongs_to_it() -> None:
    calls = Calls({"scale": (), "conv": ("scale",)}, frozenset({"conv"}))
    assert attribute(calls, [("conv",)]) == [("scale", "conv")]


@given(st.lists(st.sets(st.sampled_from(sorted(CHAIN.reads)), max_size=2), min_size=1, max_size=4))
def test_every_call_has_at_most_one_kernel_and_all_have_one_once_the_layers_are_claimed(claims: list[set[str]]) -> None:
    places = attribute(CHAIN, [*claims, {"conv"}, {"conv_1"}])
    owned = [name for place in places for name in place]
    assert sorted(owned) == sorted(CHAIN.reads)


def test_alignment_survives_operators_that_only_one_side_has() -> None:
    assert align(["to", "a", "b", "c"], ["a", "x", "b", "c"]) == [None, 0, 2, 3]


def test_the_calls_of_a_program_are_those_that_depend_on_inputs() -> None:
    program = block()
    calls = calls_of(program)
    assert list(calls.reads) == [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert calls.layers == {"conv2d", "conv2d_1", "linear"}
    assert calls.reads["add"] == ("conv2d_1", "relu")
    assert isinstance(program.inputs[0], torch.Tensor)
