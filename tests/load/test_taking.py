"""Taking over a model from a confined process: what comes back is the program this process would have captured."""

import json
import re
import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from models import REFERENCES
from optimize import graph
from optimize.errors import Refused, UsageError
from optimize.frontend import capture
from optimize.job import Job, open_program
from optimize.load import misfits, operators, stored
from optimize.load.description import Malformed, read_argument, read_tree, write_argument, write_tree
from optimize.load.identify import Kind
from optimize.load.taking import Capturing, _write_state, take_over
from optimize.program import Program
from optimize.recipe import parse
from tests import references
from tests.load.files import plain

aten = torch.ops.aten
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def same(one: Program, other: Program) -> None:
    first, second = (re.sub(r"\bs\d+\b", "s", program.text()) for program in (one, other))  # symbols have numbers
    assert first == second and one.dynamic == other.dynamic
    assert [graph.origin(node) for node in one.graph.nodes] == [graph.origin(node) for node in other.graph.nodes]
    assert one.in_spec == other.in_spec and one.out_spec == other.out_spec
    inputs = one.sample(3) if one.batch else one.inputs
    assert all(torch.equal(want, got) for want, got in zip(one.run(inputs), other.run(inputs), strict=True))
    other.check()


@pytest.mark.parametrize("name", references.each("resnet", "vit", "lstm"))
def test_a_program_goes_through_plain_data(name: str, tmp_path: Path) -> None:
    program = references.captured(name, None)
    stored.store(program, tmp_path)
    restored = stored.restore(tmp_path)
    same(program, restored)
    restored.export()


@pytest.mark.parametrize("room", [64, 2**14])
def test_a_folder_without_room_is_told_as_that(room: int, tmp_path: Path) -> None:
    """The first is too small for the graph, the second for the weights."""
    program = capture(nn.Linear(100, 100).eval(), (torch.ones(2, 100),))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(Refused, match=r"temporary folder has no room for the model: .*File too large"):
            stored.store(program, tmp_path)
        with pytest.raises(Refused, match=r"temporary folder has no room for the weights: .*File too large"):
            _write_state(tmp_path, dict(program.source.state_dict()), "weights.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Odd(nn.Module):
    """Tied weights, a buffer of integers, several inputs by name, a nested answer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.tensor([1, 2, 3, 0, 1]))

    def forward(self, ids: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        x = self.table(ids) * scale
        return {"logits": self.head(x) + self.shift, "pair": [x.amax(1), (torch.einsum("bij,bij->bi", x, x),)]}


def test_tied_weights_types_and_trees_stay(tmp_path: Path) -> None:
    ids = torch.randint(0, 5, (2, 3), generator=torch.Generator().manual_seed(0))
    program = capture(Odd().eval(), (ids,), {"scale": torch.ones(2, 3, 4)})
    program.guessed = "3 was guessed"
    stored.store(program, tmp_path)
    restored = stored.restore(tmp_path)
    same(program, restored)
    assert restored.guessed == program.guessed
    assert restored.graph_module.state_dict().keys() == program.graph_module.state_dict().keys()
    assert restored(ids, scale=torch.ones(2, 3, 4)).keys() == {"logits", "pair"}


def test_whole_module_and_old_format(tmp_path: Path) -> None:
    model = plain()
    torch.save(model, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    taken = take_over(tmp_path / "m.pt", Kind.LEGACY, lambda _: (X,), Capturing())
    assert taken.program is not None and taken.noun == "whole module" and taken.warnings == ()
    same(capture(model, (X,)), taken.program)


def test_inputs_are_asked_for_where_they_are_needed(tmp_path: Path) -> None:
    def unknown(_: object) -> tuple[torch.Tensor, ...]:
        raise UsageError("Nothing says what the model takes.")

    torch.save(plain(), tmp_path / "m.pt")
    with pytest.raises(UsageError, match="Nothing says"):
        take_over(tmp_path / "m.pt", Kind.CHECKPOINT, unknown, Capturing())
    torch.save({"model": plain().state_dict(), "epoch": 1}, tmp_path / "w.pt")
    taken = take_over(tmp_path / "w.pt", Kind.CHECKPOINT, unknown, Capturing())
    assert taken.program is None and taken.state is not None and "epoch" in taken.warnings[0]
    assert taken.state.keys() == plain().state_dict().keys()


def test_a_job_opens_state_dict_and_exported_program_alike(tmp_path: Path) -> None:
    model = REFERENCES["resnet"].build()
    x = REFERENCES["resnet"].inputs()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "p.pt2")
    recipe = parse({"input_shape": "3,32,32"}, source="test")
    want = capture(model, (x,))
    for name, factory in (("w.pt", "models.resnet:resnet_tiny"), ("p.pt2", None)):
        subject = open_program(Job(str(tmp_path / name), recipe, factory=factory))
        assert subject.sha256 is not None
        torch.testing.assert_close(subject.program.run((x,)), want.run((x,)))


Change = Callable[[dict[str, Any]], None]
FORGERIES: dict[str, Change] = {
    "operator": lambda value: value["calls"][0].update(operator="aten.from_file.default"),
    "python": lambda value: value["calls"][0].update(operator="os.system"),
    "name": lambda value: value["calls"][0].update(name="a) or __import__('os'"),
    "weight": lambda value: value["weights"].update({"w": 'a"); import os #'}),
    "text": lambda value: value["calls"][0].update(arguments=["a'\\\n\""]),
    "argument": lambda value: value["calls"][0].update(arguments=[{"value": "nowhere"}]),
    "kind": lambda value: value["calls"][0].update(arguments=[{"code": "1"}]),
    "dtype": lambda value: value["calls"][0].update(arguments=[{"dtype": "load"}]),
    "in place": lambda value: value["calls"][0].update(operator="aten.relu_.default", arguments=[{"value": "x"}]),
    "out": lambda value: value["calls"][0].update(operator="aten.relu.out"),
    "twice": lambda value: value["calls"].append(dict(value["calls"][0])),
    "tree": lambda value: value.update(out_tree=["antigravity", "*"]),
    "size": lambda value: value["dynamic"][0].update({"0": "batch)+__import__('os'"}),
    "tied": lambda value: value["tied"].update({next(iter(value["tied"])): "/etc/passwd"}),
    "deep": lambda value: value.update(in_tree=_nested(200_000)),
    "too many": lambda value: value["calls"][0].update(arguments=[1] * 50),
    "list": lambda value: value["calls"][0].update(operator="_operator.mul", arguments=[[1], 1 << 40]),
    "format": lambda value: value["calls"][0].update(operator="_operator.mod", arguments=["%3000000000d", 1]),
    "keyword": lambda value: value["calls"][0].update(keywords={"self": 1, "__class__": 2}),
    "squares": lambda value: value["calls"].extend(_repeated("mul", 20)),
    "powers": lambda value: value["calls"].extend(_repeated("pow", 6)),
    "division": lambda value: value["calls"].append(
        {"name": "ends_the_process", "operator": "aten.remainder.int", "arguments": [1, 0]}
    ),
    "modules": lambda value: value["calls"][0].update(modules=[[5, 6]]),
    "long module": lambda value: value["calls"][0].update(modules=[["a" * 100_000, "Linear"]]),
    "upwards": lambda value: value["calls"][0].update(modules=[["../../..", "Linear"]]),
    "many modules": lambda value: value["calls"][0].update(modules=[["a", "Linear"]] * 100),
    "free": lambda value: value["dynamic"][0].update({"0": "batch", "1": "batch"}),
    "calls": lambda value: value["calls"].extend([value["calls"][0]] * (1 << 16)),
}
_X, _EMPTY, _LONG = {"value": "x"}, {"value": "empty"}, {"value": "long"}
#: Calls that make millions of tensors, or dimensions, of a description of a few bytes.
BURSTS: dict[str, list[Any]] = {
    "tensor_split.sections": [_X, 1 << 26],
    "chunk.default": [_EMPTY, 1 << 26],
    "unsafe_chunk.default": [_EMPTY, 1 << 26],
    "hsplit.int": [_EMPTY, 1 << 26],
    "unbind.int": [_LONG],
    "split.Tensor": [_LONG, 2],
    "unsafe_split.Tensor": [_LONG, 2],
    "split_copy.Tensor": [_LONG, 2],
    "split_with_sizes.default": [_LONG, [0] * (1 << 16) + [1 << 26]],
    "split.sizes": [_LONG, [0] * (1 << 16) + [1 << 26]],
    "tensor_split.indices": [_X, [1] * (1 << 16)],
    "meshgrid.default": [[_X] * 100],
    "meshgrid.indexing": [[_X] * 100],
    "tensor_split.tensor_indices_or_sections": [_X, _X],
}


@pytest.mark.parametrize("operator", BURSTS)
def test_a_forged_call_does_not_burst_into_millions_of_tensors(operator: str, tmp_path: Path) -> None:
    stored.store(capture(nn.ReLU(), (torch.randn(2, 3),)), tmp_path)
    content = json.loads((tmp_path / "program.json").read_text())
    keywords = {"indexing": "ij"} if operator.endswith("indexing") else {}
    content["calls"] = [
        {"name": "x", "operator": "aten.zeros.default", "arguments": [[3]]},
        {"name": "empty", "operator": "aten.zeros.default", "arguments": [[0]]},
        {"name": "long", "operator": "aten.zeros.default", "arguments": [[1 << 26]]},
        {"name": "parts", "operator": f"aten.{operator}", "arguments": BURSTS[operator], "keywords": keywords},
        {"name": "part", "operator": "_operator.getitem", "arguments": [{"value": "parts"}, 0]},
    ]
    content["outputs"] = ["part"]
    (tmp_path / "program.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"more tensors, or dimensions|is not listed"):
        stored.restore(tmp_path)


@pytest.mark.parametrize("operator", ["tensordot.default", "linalg_multi_dot.default", "cartesian_prod.default"])
def test_dimensions_and_tables_do_not_grow_without_end(operator: str, tmp_path: Path) -> None:
    stored.store(capture(nn.ReLU(), (torch.randn(1, 1),)), tmp_path)
    content = json.loads((tmp_path / "program.json").read_text())
    content["calls"] = [{"name": "y0", "operator": "aten.zeros.default", "arguments": [[1, 1]]}]
    for place in range(8):
        value = {"value": f"y{place}"}
        arguments = [value, value, [], []] if operator.startswith("tensordot") else [[value] * 100]
        content["calls"].append({"name": f"y{place + 1}", "operator": f"aten.{operator}", "arguments": arguments})
    content["outputs"] = ["y8"]
    (tmp_path / "program.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match="more tensors, or dimensions"):
        stored.restore(tmp_path)


def _size_of_batch(*steps: tuple[str, int]) -> list[dict[str, Any]]:
    """Returns calls that compute ``size`` from the batch of ``x``."""
    calls = [{"name": "s0", "operator": "aten.sym_size.int", "arguments": [{"value": "input_1"}, 0]}]
    for place, (function, number) in enumerate(steps):
        name, arguments = f"s{place + 1}", [{"value": f"s{place}"}, number]
        calls.append({"name": name, "operator": f"_operator.{function}", "arguments": arguments})
    calls[-1]["name"] = "size"
    return calls


#: Calls of which only the example's batch of two shows what is right.
OF_THE_EXAMPLE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "channels": (
        [
            *_size_of_batch(("sub", 1), ("pow", 8), ("mul", 3)),
            {"name": "t", "operator": "aten.zeros.default", "arguments": [[1, {"value": "size"}]]},
            {"name": "w", "operator": "aten.ones.default", "arguments": [[3]]},
            {
                "name": "y",
                "operator": "aten.batch_norm.default",
                "arguments": [{"value": "t"}, *[{"value": "w"}] * 4, False, 0.1, 1e-5, False],
            },
        ],
        "another size",
    ),
    "values": (
        [
            *_size_of_batch(("sub", 1), ("pow", 8), ("mul", 1 << 27)),
            {"name": "y", "operator": "aten.zeros.default", "arguments": [[{"value": "size"}]]},
        ],
        "values",
    ),
    "no values": (
        [{"name": "y", "operator": "aten.zeros.default", "arguments": [[0, 1 << 62]]}],
        "values",
    ),
    "fixed": (
        [
            {"name": "w", "operator": "aten.ones.default", "arguments": [[2, 3]]},
            {"name": "y", "operator": "aten.add.Tensor", "arguments": [{"value": "input_1"}, {"value": "w"}]},
        ],
        "calls free is not",
    ),
    "data": (
        [
            {"name": "w", "operator": "aten.full.default", "arguments": [[], 1 << 40], "keywords": {}},
            {"name": "size", "operator": "aten._local_scalar_dense.default", "arguments": [{"value": "w"}]},
            {"name": "y", "operator": "aten.zeros.default", "arguments": [[{"value": "size"}]]},
        ],
        "its data says",
    ),
}


@pytest.mark.parametrize("name", OF_THE_EXAMPLE)
def test_what_fits_the_example_alone_does_not_come_through(name: str, tmp_path: Path) -> None:
    program = capture(nn.ReLU(), (torch.randn(2, 3),))
    assert program.dynamic == ({0: "batch"},)
    stored.store(program, tmp_path)
    content = json.loads((tmp_path / "program.json").read_text())
    content["calls"], reason = OF_THE_EXAMPLE[name]
    content["outputs"] = ["y"]
    (tmp_path / "program.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match=reason):
        stored.restore(tmp_path)


def test_no_operator_runs_to_find_its_shape(tmp_path: Path) -> None:
    """Those that have no rule of shapes would run on tensors of the sizes that a file says."""
    stored.store(capture(nn.ReLU(), (torch.randn(2, 3),)), tmp_path)
    (placeholder,) = stored.restore(tmp_path).graph.find_nodes(op="placeholder")
    assert not placeholder.meta["val"].fake_mode.allow_fallback_kernels
    with pytest.raises(operators.NotListed):
        operators.find("aten.slow_conv3d.default")


def test_a_description_comes_back_in_the_normal_form(tmp_path: Path) -> None:
    program = capture(nn.Conv2d(3, 4, 1), (torch.randn(2, 3, 4, 4),))
    stored.store(program, tmp_path)
    content = json.loads((tmp_path / "program.json").read_text())
    (call,) = [call for call in content["calls"] if "conv2d" in call["operator"]]
    call["arguments"] = call["arguments"][:2]
    (tmp_path / "program.json").write_text(json.dumps(content))
    (found,) = stored.restore(tmp_path).graph.find_nodes(op="call_function", target=aten.conv2d.default)
    assert found.args[2:] == (None, [1, 1], [0, 0], [1, 1], 1)


@pytest.mark.parametrize("parts", [3, 40])
def test_honest_splits_come_through(parts: int, tmp_path: Path) -> None:
    class Splits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, *_ = x.unbind(1)
            return first + sum(x.split(1, 1))[:, 0] + x.chunk(parts, 1)[0].sum(1) + x.tensor_split(3, 1)[2].sum(1)

    program = capture(Splits(), (torch.randn(2, parts),))
    stored.store(program, tmp_path)
    same(program, stored.restore(tmp_path))


def _repeated(function: str, times: int) -> list[dict[str, Any]]:
    """Returns the size of ``x``, multiplied by itself again and again: with more of them, it never ends."""
    calls = [{"name": "s0", "operator": "aten.sym_size.int", "arguments": [{"value": "input_1"}, 0]}]
    for place in range(times):
        value = {"value": f"s{place}"}
        arguments = [value, 8 if function == "pow" else value]
        calls.append({"name": f"s{place + 1}", "operator": f"_operator.{function}", "arguments": arguments})
    return calls


def _nested(depth: int) -> Any:
    found: Any = "*"
    for _ in range(depth):
        found = ["list", found]
    return found


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_description_is_refused(name: str, tmp_path: Path) -> None:
    """Whoever takes over the confined process can write anything into its folder."""
    stored.store(capture(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval(), (torch.randn(2, 3),)), tmp_path)
    path = tmp_path / "program.json"
    content = json.loads(path.read_text())
    if name == "deep":
        path.write_text(path.read_text().replace('"in_tree": ', '"in_tree": ' + "[" * 200_000 + '"x": ', 1))
    else:
        FORGERIES[name](content)
        path.write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"without trust|cannot be read"):
        stored.restore(tmp_path)


def _normalisation(target: Any, statistics: int, *rest: Any) -> fx.Node:
    """Returns a call on ``[2, 8, 4, 4]`` with weights and statistics of some size."""
    built = fx.Graph()
    x, given = built.placeholder("x"), built.placeholder("given")
    x.meta["val"], given.meta["val"] = torch.empty(2, 8, 4, 4), torch.empty(statistics)
    return built.call_function(target, (x, given, given, given, given, *rest))


def test_a_normalisation_neither_looks_nor_writes_beyond_its_channels() -> None:
    frozen = torch.ops.aten._native_batch_norm_legit_no_training.default
    assert misfits.find_misfit(_normalisation(frozen, 8, 0.1, 1e-5)) == ""
    assert "another size" in misfits.find_misfit(_normalisation(frozen, 1, 0.1, 1e-5))
    for target in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
        assert misfits.find_misfit(_normalisation(target, 8, False, 0.1, 1e-5, False)) == ""
        assert "writes" in misfits.find_misfit(_normalisation(target, 8, True, 0.1, 1e-5, False))


def _call(target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
    """Returns a call whose tensors are what is given, computed on shapes alone."""
    built = fx.Graph()

    def place(value: torch.Tensor) -> fx.Node:
        node = built.placeholder("given")
        node.meta["val"] = value
        return node

    def placed(value: Any) -> Any:
        return (
            [placed(entry) for entry in value]
            if isinstance(value, list)
            else place(value)
            if _is_tensor(value)
            else value
        )

    node = built.call_function(target, tuple(map(placed, arguments)), keywords)
    with FakeTensorMode(allow_non_fake_inputs=True):
        node.meta["val"] = target(*arguments, **keywords)
    return node


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _lstm(biases: int = 16, inputs: int = 3, cells: int = 2, groups: int = 1, dtype: Any = None) -> fx.Node:
    empty = torch.empty
    weights = [empty(16, inputs), empty(16, 4), empty(biases, dtype=dtype), empty(biases, dtype=dtype)] * groups
    states = [empty(1, 2, 4), empty(1, cells, 4)]
    return _call(aten.lstm.input, empty(5, 2, 3), states, weights, True, 1, 0.0, False, False, False)


def _cell(kind: Any, gates: int, bias: tuple[int, ...] = ()) -> fx.Node:
    """Returns a call that is not computed: with a bias of another shape, that ends the process."""
    shapes = [(2, 3), (2, 4), (gates * 4, 3), (gates * 4, 4), (gates * 4,), bias or (gates * 4,)]
    built, nodes = fx.Graph(), []
    for shape in shapes:
        nodes.append(built.placeholder("given"))
        nodes[-1].meta["val"] = torch.empty(shape)
    x, state, *weights = nodes
    return built.call_function(kind, (x, [state, state] if gates == 4 else state, *weights))


def _projected(states: int) -> fx.Node:
    empty = torch.empty
    weights = [empty(16, 3), empty(16, 2), empty(16), empty(16), empty(2, 4)]
    node = _call(aten.lstm.input, empty(5, 2, 3), [empty(1, 2, 2), empty(1, 2, 4)], weights, True, 1, 0.0, *[False] * 3)
    node.args[1][0].meta["val"] = empty(states, 2, 2)
    return node


def _transposed(kernel: int) -> fx.Node:
    return _call(aten.slow_conv_transpose2d.default, torch.empty(1, 2, 4, 4), torch.empty(2, 3, 2, 2), [kernel] * 2)


def _smooth(scale: float | None, size: int = 4) -> fx.Node:
    target = aten._upsample_bilinear2d_aa.default
    return _call(target, torch.empty(1, 1, 8, 8), [size, size], False, scale, None)


def _divided(divisor: Any, dtype: torch.dtype = torch.int64, mode: str = "trunc") -> fx.Node:
    return _call(aten.div.Tensor_mode, torch.ones(2, dtype=dtype), divisor, rounding_mode=mode)


def _padded(sizes: list[int], mode: str = "circular") -> fx.Node:
    return _call(aten.pad.default, torch.empty(1, 2, 8), sizes, mode)


def _transformed(dim: int, last: int | None = None) -> fx.Node:
    values = torch.empty(1, 4, 7, dtype=torch.complex64 if last else torch.float32)
    if last is None:
        return _call(aten._fft_r2c.default, values, [dim], 0, True)
    return _call(aten._fft_c2r.default, values, [dim], 0, last)


def _bags(step: int | None, bags: int = 2, **keywords: Any) -> fx.Node:
    """Returns the sums of three rows of a table, from offsets that are counted in a step, or given."""
    node = _call(aten._embedding_bag.default, torch.empty(9, 4), torch.ones(3).long(), torch.ones(2).long())
    if step is not None:
        with node.graph.inserting_before(node):
            offsets = node.graph.call_function(aten.arange.start_step, (0, 3, step), keywords)
            offsets.meta["val"] = torch.empty(bags)
            node.update_arg(2, offsets)
    return node


def _mean(weights: int) -> fx.Node:
    one = torch.empty(weights)
    return _call(aten._native_batch_norm_legit.no_stats, torch.empty(2, 4, 2), one, one, True, 0.1, 1e-5)


def _sampled(interpolation: int, padding: int) -> fx.Node:
    """Returns a sampling whose modes are not looked at on shapes."""
    node = _call(aten.grid_sampler.default, torch.empty(1, 2, 8, 8), torch.empty(1, 4, 4, 2), 0, 0, False)
    node.args = (*node.args[:2], interpolation, padding, False)
    return node


def _pooled(kernel: int, size: int = 8) -> fx.Node:
    return _call(aten.max_pool1d.default, torch.empty(1, 2, size), [kernel], [1], [kernel // 2])


def _attention(keys: int, values: int, batch: int = 2, queries: int = 9) -> fx.Node:
    empty = torch.empty
    return _call(
        aten.scaled_dot_product_attention.default,
        empty(2, 4, queries, 8),
        empty(batch, 4, keys, 8),
        empty(batch, 4, values, 8),
    )


def _shared(heads: int) -> fx.Node:
    """Returns attention whose keys are shared by several heads; with none the process ends when it is computed."""
    node = _attention(6, 6)
    node.kwargs = {"enable_gqa": True}
    for value in node.all_input_nodes[1:]:
        value.meta["val"] = torch.empty(2, heads, 6, 8)
    return node


def _fused(batch: int = 2, queries: int = 9) -> fx.Node:
    node = _attention(9, 9, batch, queries)
    node.target = aten._scaled_dot_product_flash_attention_for_cpu.default
    return node


def _lengths(count: int, dim: int = 0) -> fx.Node:
    return _call(aten._weight_norm.default, torch.empty(4, 4), torch.empty(count), dim)


def _heads(count: int) -> fx.Node:
    empty = torch.empty
    x, weights = empty(1, 2, 8), [empty(24, 8), empty(24), empty(8, 8), empty(8)]
    return _call(aten._native_multi_head_attention.default, x, x, x, 8, count, *weights)


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(lambda: _lstm(biases=0), id="biases"),
        pytest.param(lambda: _lstm(inputs=300), id="weights"),
        pytest.param(lambda: _lstm(cells=1), id="states"),
        pytest.param(lambda: _lstm(groups=2), id="weights-too-many"),
        pytest.param(lambda: _projected(3), id="projections"),
        pytest.param(lambda: _cell(aten.lstm_cell.default, 4, (4, 2, 1)), id="cell"),
        pytest.param(lambda: _cell(aten.gru_cell.default, 3, (4,)), id="cell-of-gru"),
        pytest.param(lambda: _lstm(dtype=torch.float64), id="types"),
        pytest.param(lambda: _transposed(2000), id="kernel"),
        pytest.param(lambda: _smooth(1e-5, 16), id="scale"),
        pytest.param(lambda: _divided(torch.ones(2).long()), id="divisor"),
        pytest.param(lambda: _divided(-1), id="minus-one"),
        pytest.param(lambda: _padded([8, -15]), id="circle"),
        pytest.param(lambda: _bags(None), id="offsets"),
        pytest.param(lambda: _bags(-5), id="falling"),
        pytest.param(lambda: _bags(2, dtype=torch.int32), id="wrapping"),
        pytest.param(lambda: _bags(2, bags=0), id="no-bags"),
        pytest.param(lambda: _transformed(-2), id="transform"),
        pytest.param(lambda: _transformed(2, 40), id="transform-back"),
        pytest.param(lambda: _call(aten._pdist_forward.default, torch.zeros(5, 1, 0)), id="distances"),
        pytest.param(lambda: _mean(1), id="without-statistics"),
        pytest.param(lambda: _sampled(9, 0), id="interpolation"),
        pytest.param(lambda: _sampled(0, 9), id="border"),
        pytest.param(lambda: _sampled(-1, 0), id="no-interpolation"),
        pytest.param(lambda: _pooled(2**40), id="window"),
        pytest.param(lambda: _attention(2, 600), id="keys"),
        pytest.param(lambda: _fused(batch=1), id="samples"),
        pytest.param(lambda: _fused(queries=0), id="queries"),
        pytest.param(lambda: _shared(0), id="no-heads-of-keys"),
        pytest.param(lambda: _lengths(1), id="lengths"),
        pytest.param(lambda: _heads(0), id="heads"),
    ],
)
def test_what_kernels_do_not_look_at_is_looked_at(node: Callable[[], fx.Node]) -> None:
    assert misfits.find_misfit(node())


@pytest.mark.parametrize(
    "node",
    [
        _lstm,
        lambda: _projected(1),
        lambda: _cell(aten.lstm_cell.default, 4),
        lambda: _cell(aten.gru_cell.default, 3),
        lambda: _transposed(2),
        lambda: _smooth(0.5),
        lambda: _smooth(None),
        lambda: _divided(4),
        lambda: _divided(torch.ones(2), torch.float32),
        lambda: _divided(4, mode="floor"),
        lambda: _padded([3, 4]),
        lambda: _padded([-3, 4], "constant"),
        lambda: _bags(2),
        lambda: _transformed(1),
        lambda: _transformed(2, 12),
        lambda: _mean(4),
        lambda: _sampled(2, 2),
        lambda: _pooled(13, 2),
        lambda: _attention(6, 6),
        lambda: _attention(6, 6, batch=1),
        lambda: _shared(1),
        _fused,
        lambda: _lengths(4),
        lambda: _lengths(1, dim=-1),
        lambda: _heads(2),
    ],
)
def test_calls_that_fit_are_left_alone(node: Callable[[], fx.Node]) -> None:
    assert misfits.find_misfit(node()) == ""


class Divides(nn.Module):
    """Divides whole numbers in one of the ways that there are, by what it finds in its input or by what it holds."""

    def __init__(self, way: str, held: int | None = None) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("held", None if held is None else torch.tensor([3, held, 5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        divisor = torch.where(x.sum() == 0, -1, 1) if self.held is None else self.held
        whole = x.to(torch.int64)
        if self.way in ("trunc", "floor"):
            return x + torch.div(whole, divisor, rounding_mode=self.way)
        return x + getattr(torch, self.way)(whole, divisor)


#: ONNX Runtime ends the process over the remainder of the smallest integer by minus one, and over any by zero.
@pytest.mark.parametrize("way", ["trunc", "floor", "remainder", "fmod", "floor_divide"])
def test_a_division_that_only_other_data_shows_does_not_end_the_process(way: str, tmp_path: Path) -> None:
    def taken(held: int | None) -> Program:
        folder = tmp_path / str(held)
        folder.mkdir()
        stored.store(capture(Divides(way, held).eval(), (torch.ones(2, 3),)), folder)
        return stored.restore(folder)

    with pytest.raises(Refused, match="minus one"):
        taken(None)
    with pytest.raises(Refused, match="not positive"):
        taken(-1)
    x = torch.tensor([[7.0, 8.0, 9.0]])
    torch.testing.assert_close(taken(2)(x), Divides(way, 2)(x))


def test_the_smallest_number_is_none() -> None:
    """Its power of a matrix never ends: who negates it, finds it again."""
    with pytest.raises(Malformed, match="64 bits"):
        read_argument(-(1 << 63), {})


def test_a_forged_training_mode_is_refused(tmp_path: Path) -> None:
    stored.store(capture(nn.BatchNorm2d(8).eval(), (torch.randn(2, 8, 1, 1),)), tmp_path)
    content = json.loads((tmp_path / "program.json").read_text())
    content["calls"][0]["arguments"][5] = True
    (tmp_path / "program.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match="writes to its statistics"):
        stored.restore(tmp_path)


def test_memory_is_never_left_as_it_is_found() -> None:
    for name in ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"):
        assert "zeros" in operators.name_of(operators.find(name))


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    stored.store(capture(nn.ReLU(), (torch.randn(2, 3),)), tmp_path)
    (tmp_path / "program.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "program.json").symlink_to("elsewhere.json")
    with pytest.raises(Refused, match="left no answer"):
        stored.restore(tmp_path)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -1.5, float("inf"), float("-inf"), 1j, "bij,bij->bi", [1, [2.0, None]], torch.float16,
     torch.strided, torch.channels_last, torch.device("cpu"), slice(1, None, 2)],
    ids=str,
)  # fmt: skip
def test_arguments_come_back_as_they_were(value: object) -> None:
    assert read_argument(json.loads(json.dumps(write_argument(value))), {}) == value


def test_trees_come_back_as_they_were() -> None:
    for value in ((0, [0, {"a": 0, 3: (0,)}]), OrderedDict(b=0, a=[0, None]), 0):
        spec = pytree.tree_structure(value)
        assert read_tree(json.loads(json.dumps(write_tree(spec)))) == spec


def test_every_listed_operator_exists_and_nothing_else_is_found() -> None:
    assert all(hasattr(torch.ops.aten, name) for name in operators.ATEN)
    for name in ("aten.save.default", "aten.from_file.default", "aten.set_.source_Tensor", "aten._print.default",
                 "inductor._reinterpret_tensor.default", "prims.add.default", "os.system", "builtins.eval",
                 "aten._reshape_alias.default", "aten.empty_strided.default", "aten.repeat_interleave.Tensor",
                 "aten._transform_bias_rescale_qkv.default", "aten._masked_softmax.default",
                 "aten.slow_conv_transpose3d.default", "aten.combinations.default",
                 "aten.native_batch_norm.default", "aten.conv2d.nothing", "aten.add.out",
                 "aten.__class__.default"):  # fmt: skip
        with pytest.raises(operators.NotListed):
            operators.find(name)
    assert operators.name_of(operators.find("aten.add_.Tensor")) == "aten.add_.Tensor"


def test_weights_of_every_type_and_shape(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3).t(), "b": torch.ones(4)[1:3], "c": torch.zeros(0, 3), "d": torch.tensor(1.5)}
    torch.save(tensors, tmp_path / "w.pt")
    taken = take_over(tmp_path / "w.pt", Kind.CHECKPOINT, lambda _: (X,), Capturing())
    assert taken.state is not None
    assert all(torch.equal(taken.state[key], value) for key, value in tensors.items())
    safetensors.torch.save_file(taken.state, tmp_path / "again.safetensors")


def test_malformed_is_told_apart() -> None:
    with pytest.raises(Malformed):
        write_argument(object())
