"""What the user keeps in float stays there: in every pass that chooses a precision, and in the deployed file."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES
from optimize import graph, ops, registry
from optimize.errors import UsageError
from optimize.passes.base import PrecisionPass
from optimize.passes.cast_half import CastBF16
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from tests import references

PASSES = sorted(name for name, cls in registry.passes().items() if issubclass(cls, PrecisionPass))
DATA = torch.rand(16, 3, 12, 12)


class Net(nn.Module):
    """A stem, a block that is called twice, and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(800, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(self.block(torch.relu(self.block(x)))))


def captured() -> Program:
    """Return ``Net`` captured, nothing of it shared."""
    return _captured().clone()


@functools.cache
def _captured() -> Program:
    torch.manual_seed(0)
    return optimize.capture(Net().eval(), (DATA[:2],))


def made(name: str, **options: Any) -> PrecisionPass:
    cls = registry.find_pass(name)
    given = {"calibration": [DATA], "train": lambda module: None, "smallest": 0, **options}
    fields = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in given.items() if key in fields})


def weights(program: Program, path: str) -> list[torch.Tensor]:
    layers = [node for node in graph.calls(program.graph, *ops.WEIGHTED) if graph.origin(node) == path]
    return [graph.constant(program.graph_module, graph.argument(node, "weight")) for node in layers]


@pytest.mark.parametrize("name", PASSES)
def test_what_is_kept_is_as_it_was_and_the_outcome_says_so(name: str) -> None:
    program = captured()
    changed, outcome = made(name, keep=("head.3",)).apply(program)
    assert outcome.rewrites and not any(rewrite.where == "head.3" for rewrite in outcome.rewrites)
    (skip,) = [skip for skip in outcome.skips if skip.where == "head.3"]
    assert skip.reason == "you keep 'head.3' in float"
    (before,), (after,) = weights(program, "head.3"), weights(changed, "head.3")
    assert after.dtype == torch.float32 and torch.equal(before, after)
    if changed.quantization is not None:
        (node,) = [node for node in graph.calls(changed.graph, *ops.WEIGHTED) if graph.origin(node) == "head.3"]
        assert node.name not in changed.quantization.layers
        assert changed.quantization.left_float[node.name] == skip.reason


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("keep", [("*",), ("stem", "block", "head", "relu*", "*relu*", "*")])
def test_where_all_is_kept_nothing_changes(name: str, keep: tuple[str, ...]) -> None:
    program = captured()
    changed, outcome = made(name, keep=keep).apply(program)
    assert changed is program and not outcome.rewrites


def test_a_module_stands_for_all_within_it_and_stars_for_any_letters() -> None:
    program = captured()
    named = {
        word: {graph.origin(node) for node in QuantizeStatic(calibration=[DATA], keep=(word,)).kept(program)}
        for word in ("head", "head.1", "*.1", "h*.1", "b*")
    }
    assert named["head"] >= {"head.0", "head.1", "head.2", "head.3"}
    assert named["head.1"] == named["*.1"] == named["h*.1"] == {"head.1"}
    assert named["b*"] == {"block"}


def test_a_call_of_a_shared_module_is_named_as_reports_number_it() -> None:
    program = captured()
    assert list(ops.layer_paths(program.graph).values()) == ["stem", "block", "block_1", "head.1", "head.3"]
    changed, _ = QuantizeStatic(calibration=[DATA], keep=("block_1",)).apply(program)
    assert changed.quantization is not None
    kept = {ops.layer_paths(changed.graph)[name] for name in changed.quantization.left_float}
    assert kept == {"block_1"}
    both, _ = QuantizeStatic(calibration=[DATA], keep=("block",)).apply(program)
    assert both.quantization is not None and len(both.quantization.left_float) == 2


@pytest.mark.parametrize("word", ["haed", "head.7", "", "stem.weight", "hea?", "[h]ead", "*a" * 40 + "*b"])
def test_a_name_that_misses_is_refused_with_the_nearest(word: str) -> None:
    with pytest.raises(UsageError, match="the program has no such module") as caught:
        QuantizeStatic(calibration=[DATA], keep=(word,)).apply(captured())
    assert "Known: block" in caught.value.hint
    if word == "haed":
        assert "Did you mean 'head'?" in caught.value.hint


def test_the_word_of_the_user_comes_before_any_policy() -> None:
    kept = CastBF16(policy="O3", keep="head").apply(captured())[0]
    assert {weight.dtype for path in ("head.1", "head.3") for weight in weights(kept, path)} == {torch.float32}
    assert {weight.dtype for path in ("stem", "block") for weight in weights(kept, path)} == {torch.bfloat16}
    mixed = optimize.Pipeline(
        [QuantizeStatic(calibration=[DATA], keep=("head",)), CastBF16(mixed=True, calibration=[DATA], keep=("head",))]
    ).run(captured())
    plan = mixed.program.quantization
    assert plan is not None and plan.half is not None
    layers = {graph.origin(node): node.name for node in graph.calls(mixed.program.graph, *ops.WEIGHTED)}
    assert {layers["head.1"], layers["head.3"]} <= plan.half.floats and not {layers["head.1"]} & plan.layers


@pytest.mark.parametrize("target", ["onnx", "torchscript", "openvino"])
def test_the_deployed_file_computes_it_in_float(target: str, tmp_path: Path) -> None:
    if not registry.find_target(target).available().export:
        pytest.skip(f"{target} is not installed")
    reference = REFERENCES["resnet"]
    program = references.captured("resnet", None)
    folded = optimize.Pipeline([optimize.FuseConvBN()]).run(program).program
    quantized, _ = QuantizeStatic(calibration=[reference.inputs(16)], keep=("blocks.1", "head")).apply(folded)
    suffix = registry.find_target(target).suffix
    coverage = optimize.export(quantized, target, tmp_path / f"net{suffix}").coverage
    assert coverage is not None
    left = {layer.name: layer.reason for layer in coverage.left_float if "you keep" in layer.reason}
    assert left == {
        **dict.fromkeys(
            ("blocks.1.first.conv", "blocks.1.second.conv", "blocks.1.shortcut.conv"), "you keep 'blocks.1' in float"
        ),
        "head": "you keep 'head' in float",
    }
    assert set(coverage.quantized).isdisjoint(left) and len(coverage.quantized) == 6


def test_a_runtime_that_has_one_float_type_says_what_it_does_to_it(tmp_path: Path) -> None:
    if not registry.find_target("openvino").available().export:
        pytest.skip("openvino is not installed")
    cast, _ = CastBF16(keep=("head",)).apply(captured())
    notes = optimize.export(cast, "openvino", tmp_path / "net.xml").notes
    assert "2 layers kept in float32 run in bfloat16: the file has one float type." in notes
