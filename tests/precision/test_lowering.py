"""INT8 beside half: a plan on the program, and the two forms that runtimes lower it to."""

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize.errors import Refused
from optimize.graph import op_name
from optimize.precision.lowering import lower_half, refuse_mixed
from optimize.program import Program, tensor_value
from optimize.quantization.weights import give_back


class Block(nn.Module):
    """Two linear layers with a softmax and a product of activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        weights = torch.softmax(hidden @ hidden.transpose(1, 2), -1)
        return self.last(nn.functional.gelu(weights @ hidden))


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    return [torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def quantized(data: list[Tensor]) -> Program:
    torch.manual_seed(0)
    captured = optimize.capture(Block().eval(), (data[0][:2],))
    return optimize.Pipeline([optimize.QuantizeStatic(calibration=data)]).run(captured).program


def types(program: Program) -> dict[str, list[torch.dtype]]:
    found: dict[str, list[torch.dtype]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            found.setdefault(op_name(node), []).append(tensor_value(node).dtype)  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("cast", [optimize.CastFP16, optimize.CastBF16])
def test_a_quantized_program_gets_a_half_plan_and_keeps_its_graph(
    cast: type, quantized: Program, data: list[Tensor]
) -> None:
    trace = optimize.Pipeline([cast(calibration=data)]).run(quantized)
    plan = trace.program.quantization
    dtype = str(cast.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
    assert plan is not None and plan.half is not None and plan.half.dtype == dtype
    assert trace.program.precision == f"int8-{dtype}"
    assert plan.text().endswith(f"the rest {dtype}")
    assert trace.program.text().splitlines()[:-1] == quantized.text().splitlines()[:-1]
    assert (plan.layers, plan.ranges) == (quantized.quantization.layers, quantized.quantization.ranges)  # type: ignore[union-attr]
    assert {rewrite.what for rewrite in trace.steps[0].outcome.rewrites} == {f"matmul to {dtype}"}
    trace.program.check()
    again, outcome = cast(calibration=data).apply(trace.program)
    assert again is trace.program and not outcome.rewrites


def test_layers_compute_in_half_or_in_float32_as_the_runtime_wants(quantized: Program) -> None:
    mixed, _ = optimize.CastFP16(policy="O2").apply(quantized)
    half, wide = lower_half(mixed, integers="half"), lower_half(mixed, integers="float32")
    assert types(half)["linear"] == [torch.float16] * 2 == types(half)["matmul"]
    assert types(wide)["linear"] == [torch.float32] * 2 and types(wide)["matmul"] == [torch.float16] * 2
    for lowered in (half, wide):
        assert lowered.quantization is not None and lowered.quantization.half is None
        assert lowered.quantization.layers == quantized.quantization.layers  # type: ignore[union-attr]
        lowered.check()
        x = torch.randn(3, 6, 16)
        error = (lowered.run((x,))[0] - quantized.run((x,))[0]).abs().max()
        assert error < 5e-3
    assert mixed.quantization is not None and mixed.quantization.half is not None
    assert lower_half(quantized, integers="half") is quantized


def test_a_layer_given_back_runs_in_half_with_the_rest(quantized: Program) -> None:
    mixed, _ = optimize.CastFP16(policy="O2").apply(quantized)
    name = min(mixed.quantization.layers)  # type: ignore[union-attr]
    returned = give_back(mixed, {name: "it was asked for"})
    assert types(lower_half(returned, integers="float32"))["linear"].count(torch.float16) == 1


def test_inputs_and_outputs_are_half_where_that_is_asked(quantized: Program) -> None:
    mixed, _ = optimize.CastBF16(io="half").apply(quantized)
    assert mixed.inputs[0].dtype is torch.float32
    lowered = lower_half(mixed, integers="float32")
    assert lowered.inputs[0].dtype is torch.bfloat16
    assert lowered.run(lowered.inputs)[0].dtype is torch.bfloat16


def test_runtimes_without_the_form_refuse_it(quantized: Program) -> None:
    mixed, _ = optimize.CastFP16().apply(quantized)
    refuse_mixed(quantized, "TorchScript")
    with pytest.raises(Refused, match="TorchScript has no INT8 mixed with float16"):
        refuse_mixed(mixed, "TorchScript")


def test_what_cannot_be_mixed_says_so(quantized: Program) -> None:
    program = optimize.capture(nn.Linear(16, 4).eval(), (torch.rand(2, 16),))
    dynamic, _ = optimize.QuantizeDynamic().apply(program)
    with pytest.raises(Refused, match="CastFP16 cannot follow int8-dynamic"):
        optimize.CastFP16().apply(dynamic)
    with pytest.raises(Refused, match="found no INT8 to mix with"):
        optimize.CastFP16(mixed=True).apply(program)


def test_the_invariant_names_a_node_that_is_gone(quantized: Program) -> None:
    import dataclasses

    mixed, _ = optimize.CastFP16().apply(quantized)
    plan = mixed.quantization
    assert plan is not None and plan.half is not None
    half = dataclasses.replace(plan.half, halves=plan.half.halves | {"gone"})
    broken = dataclasses.replace(mixed, quantization=dataclasses.replace(plan, half=half))
    with pytest.raises(optimize.errors.VerificationFailed, match="names 'gone', which is not in the graph"):
        broken.check()
