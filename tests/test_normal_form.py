"""The normal form of a captured graph."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from models import REFERENCES
from optimize import from_export, graph
from optimize.costs import count
from optimize.frontend_graphs import capture_exported, capture_torchscript
from optimize.normal_form import is_settled, write_out_of_place
from optimize.registry import find_target
from tests import references


class Parts(nn.Module):
    """Computes with the parts of one packed weight."""

    def __init__(self, sizes: int | list[int], dim: int) -> None:
        super().__init__()
        self.packed, self.sizes, self.dim = nn.Parameter(torch.randn(12, 12)), sizes, dim

    def forward(self, x: Tensor) -> list[Tensor]:
        parts = self.packed.split(self.sizes, self.dim)
        return [functional.linear(x[:, : part.shape[1]], part) for part in parts]


@pytest.mark.parametrize("sizes", [4, 5, [2, 3, 7]])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_of_a_split_weight_are_constant_slices(sizes: int | list[int], dim: int) -> None:
    net, x = Parts(sizes, dim).eval(), torch.randn(3, 12)
    program = optimize.capture(net, (x,))
    weights = [node.args[1] for node in graph.calls(program.graph, graph.aten.linear.default)]
    assert len(weights) == 3
    for node, part in zip(weights, net.packed.split(sizes, dim), strict=True):
        value = graph.constant(program.graph_module, node)
        assert value is not None and torch.equal(value, part)
    assert not any("split" in graph.op_name(node) for node in program.graph.nodes if node.op == "call_function")
    for want, got in zip(net(x), program(x), strict=True):
        assert torch.equal(want, got)


def residual(y: Tensor) -> Tensor:
    return functional.relu(y, inplace=True) + y


def viewed(y: Tensor) -> Tensor:
    rows = y.flatten(1)
    y.relu_()
    return rows


def halves(y: Tensor) -> Tensor:
    first, second = y.chunk(2, 1)
    y.relu_()
    return first + second


def read_before(y: Tensor) -> Tensor:
    doubled = y * 2
    return doubled + functional.hardswish(y, inplace=True)


def part(y: Tensor) -> Tensor:
    y[:, :2].relu_()
    return y


def chained(y: Tensor) -> Tensor:
    return functional.silu(y.add_(1).mul_(y), inplace=True)


def same(y: Tensor) -> Tensor:
    again = y.to(torch.float32)
    y.relu_()
    return again


def power(y: Tensor) -> Tensor:
    return y.pow_(2)


def masks(y: Tensor) -> Tensor:
    return (y * 1).gt_(0) + (y * 1).lt_(0.1).logical_not_()


def wider(y: Tensor) -> Tensor:
    return y.mul_(torch.arange(1, 5, dtype=torch.float64)[:, None, None])


def half(y: Tensor) -> Tensor:
    return torch.zeros(y.shape, dtype=torch.float16).add_(y)


def dropped(y: Tensor) -> Tensor:
    return functional.relu(functional.dropout(y, training=False), inplace=True) + y


def dropped_in_place(y: Tensor) -> Tensor:
    kept = functional.dropout(y, training=False, inplace=True)
    y.cumsum_(1)
    return functional.dropout(kept, training=False)


class Overwriting(nn.Module):
    """A convolution and something that overwrites its result."""

    def __init__(self, following: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.following = nn.Conv2d(3, 4, 3), following

    def forward(self, x: Tensor) -> Tensor:
        return self.following(self.conv(x))


@pytest.mark.parametrize(
    "following",
    [
        residual, viewed, halves, read_before, part, chained, same, power, masks, wider, half, dropped,
        dropped_in_place,
    ],
)  # fmt: skip
def test_what_is_overwritten_is_read_afterwards_as_in_the_module(following: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net, x = Overwriting(following).eval(), torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        got, want = optimize.capture(net, (x[:2],)).run((x,))[0], net(x)
    assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(
    ("following", "is_rewritten"),
    [(residual, True), (read_before, True), (chained, True), (viewed, False), (halves, False), (part, False)],
)
def test_calls_that_overwrite_a_value_of_their_own_are_written_out_of_place(
    following: Callable[[Tensor], Tensor], is_rewritten: bool
) -> None:
    with torch.no_grad():
        exported = torch.export.export(Overwriting(following).eval(), (torch.randn(2, 3, 6, 6),))
    write_out_of_place(exported.graph)
    calls = [node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    overwrites = any(call._schema.is_mutable for call in calls)
    assert overwrites is not is_rewritten


def test_a_free_size_beside_none_is_read_not_worked_out() -> None:
    net, x = Overwriting(lambda y: torch.cat([y[:, :0].flatten(1), y.flatten(1)], 1)).eval(), torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        assert torch.equal(optimize.capture(net, (x[:2],)).run((x,))[0], net(x))


def strided(y: Tensor) -> Tensor:
    return y.permute(0, 2, 3, 1).contiguous().as_strided((y.shape[0], 3), (64, 1)) * 2


def turned(y: Tensor) -> Tensor:
    pairs = torch.view_as_complex(y.unflatten(1, (2, 2)).movedim(2, -1).contiguous())
    return torch.view_as_real(pairs * pairs)


@pytest.mark.parametrize("following", [strided, turned])
def test_a_copy_that_lays_a_value_out_for_calls_that_read_strides_is_kept(
    following: Callable[[Tensor], Tensor],
) -> None:
    net, x = Overwriting(following).eval(), torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        assert torch.equal(optimize.capture(net, (x[:2],)).run((x,))[0], net(x))


class Everything(nn.Module):
    """Operators of which torch's functionalization leaves some as they are, and writes others anew."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.up = (
            nn.Conv2d(3, 8, 3, padding="same"),
            nn.BatchNorm2d(8),
            nn.Upsample(scale_factor=2),
        )
        self.drop, self.attend = nn.Dropout(), nn.MultiheadAttention(8, 2, batch_first=True)
        self.rows, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.conv(functional.pad(x, (1, 0)))), inplace=True)
        first, second = self.up(y).split(4, 1)
        y = torch.cat([first.contiguous(), functional.hardswish(second)], 1)
        tokens = self.rows(self.drop(y.flatten(2).transpose(1, 2)))
        tokens = tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(tokens.mean(1).reshape(x.shape[0], -1)).unflatten(1, (2, 2)).flatten(1)


def written(program: optimize.Program) -> list[tuple[str, str]]:
    """Returns what a program calls and the shapes that come of it; where sizes are read is left out."""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and "val" in node.meta]
    return [(graph.op_name(node), str(node.meta["val"])) for node in calls if "sym_size" not in str(node.target)]


def test_what_needs_no_functionalization_is_written_as_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = Everything().eval(), torch.randn(3, 3, 6, 5)
    quick = optimize.capture(net, (x[:2],))
    monkeypatch.setattr(from_export, "is_settled", lambda flow: False)
    slow = optimize.capture(net, (x[:2],))
    assert written(quick) == written(slow)
    with torch.no_grad():
        assert torch.equal(quick.run((x,))[0], slow.run((x,))[0]) and torch.allclose(quick.run((x,))[0], net(x))


@pytest.mark.parametrize(
    ("following", "is_written_here"),
    [(residual, True), (viewed, False), (lambda y: y.flatten(0, 2), True), (lambda y: y.flatten(1), False)],
)
def test_shapes_with_two_free_sizes_and_values_that_are_overwritten_are_left_to_torch(
    following: Callable[[Tensor], Tensor], is_written_here: bool
) -> None:
    free = {"x": {0: torch.export.Dim("batch", min=1, max=9), 2: torch.export.Dim("rows", min=4, max=9)}}
    with torch.no_grad():
        exported = torch.export.export(Overwriting(following).eval(), (torch.randn(2, 3, 6, 6),), dynamic_shapes=free)
    write_out_of_place(exported.graph)
    assert is_settled(exported.graph) is is_written_here


class Bags(nn.Module):
    """Bags of one size, as rows of ids are, and bags that begin where offsets say."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, mode=mode)

    def forward(self, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), self.table(ids.flatten(), offsets)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size_are_embeddings_and_their_reduction(mode: str) -> None:
    net, ids, offsets = Bags(mode).eval(), torch.randint(0, 20, (3, 5)), torch.tensor([0, 2, 9])
    program = optimize.capture(net, (ids, offsets))
    called = [graph.op_name(node) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count("embedding") == 1 and called.count("embedding_bag") == 1
    for want, got in zip(net(ids, offsets), program(ids, offsets), strict=True):
        assert torch.allclose(want, got, atol=1e-6)


def test_bags_over_part_of_the_ids_are_left_as_they_are() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(20, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids.flatten(), torch.arange(0, ids.numel() - ids.shape[1], ids.shape[1]))

    net, ids = Part().eval(), torch.randint(0, 20, (3, 5))
    program = optimize.capture(net, (ids,), dynamic_batch=False)
    assert torch.allclose(program(ids), net(ids), atol=1e-6) and program(ids).shape == (2, 4)


def test_bags_that_leave_out_the_last_row_are_left_as_they_are() -> None:
    class LastOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(10, 4))

        def forward(self, ids: Tensor) -> Tensor:
            starts = torch.arange(0, ids.shape[0] * 4, 4)
            bags = graph.aten.embedding_bag.padding_idx
            return bags(self.table, ids.reshape(-1), starts, False, 0, False, None, False, -1)[0]

    net, ids = LastOut().eval(), torch.tensor([[1, 2, 9, 3], [9, 9, 0, 1]])
    assert torch.allclose(optimize.capture(net, (ids,), dynamic_batch=False)(ids), net(ids), atol=1e-6)


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "as torch's attention": lambda y: y.unflatten(-1, (3, 4)).unsqueeze(0).transpose(0, -2).squeeze(-2)[1],
    "each": lambda y: torch.stack(y.reshape(*y.shape[:2], 3, 4).unbind(2)),
    "the last": lambda y: y.reshape(*y.shape[:2], 3, 4).select(2, -1),
    "permuted": lambda y: y.reshape(*y.shape[:2], 3, 4).permute(2, 0, 1, 3)[2],
}
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda y: y.reshape(*y.shape[:2], 4, 3)[..., 1],
    "heads of three": lambda y: y.reshape(*y.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)[1],
    "other rows": lambda y: y.reshape(*y.shape[:2], 3, 4).permute(2, 1, 0, 3)[1],
    "of tokens": lambda y: y.reshape(y.shape[0], 5, 3, 4)[:, 2],
    "of tokens that were split": lambda y: y[:, :4].reshape(-1, 2, 2, 12)[:, :, 1],
    "with an axis more": lambda y: y.reshape(*y.shape[:2], 3, 4).unsqueeze(-1)[:, :, 1],
}


@pytest.mark.parametrize("form", [*TAKEN, *KEPT])
def test_a_part_of_the_last_axis_that_was_split_is_a_slice_of_it_and_no_other(form: str) -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 12)

        def forward(self, x: Tensor) -> Tensor:
            return {**TAKEN, **KEPT}[form](self.layer(x))

    net, x = Behind().eval(), torch.randn(2, 5, 6)
    program = optimize.capture(net, (x,), dynamic_batch=False)
    assert torch.equal(program(x), net(x))
    taken = [graph.op_name(node) for node in graph.calls(program.graph, graph.aten.select.int, graph.aten.unbind.int)]
    assert bool(taken) == (form in KEPT)


def test_a_part_whose_place_is_computed_is_taken_as_it_was() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).reshape(x.shape[0], 5, 3, 4).select(2, x.shape[0] % 3)

    net, x = Chosen().eval(), torch.randn(4, 5, 6)
    program = optimize.capture(net, (x,))
    for batch in (x, x[:2]):
        assert torch.allclose(program(batch), net(batch), atol=1e-6)


def test_a_reshape_that_parts_no_heads_is_left_as_it_is() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            samples = x.shape[0]
            joined = x.relu().transpose(0, 1).reshape(2, samples * 4, 2)
            return joined.transpose(0, 1).contiguous().view(samples, 2, 2, 4).reshape(samples, 2, 8)

    net, x = Mixed(), torch.randn(5, 2, 8)
    assert torch.equal(optimize.capture(net, (x,))(x), net(x))


def test_heads_whose_sizes_are_left_to_torch_twice_are_left_as_they_are() -> None:
    class Left(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            joined = x.relu().view(-1, x.shape[1] * 2, 4)
            return joined.transpose(0, 1).view(-1, 2, x.shape[0], 4)

    net, x = Left(), torch.randn(3, 5, 8)
    assert torch.equal(optimize.capture(net, (x,))(x), net(x))


@pytest.mark.parametrize(("share", "training"), [(0.0, True), (0.5, False)])
def test_dropout_that_drops_nothing_is_what_it_reads_when_that_is_overwritten(share: float, training: bool) -> None:
    class Overwritten(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            doubled = x * 2
            return nn.functional.dropout(doubled, share, training).relu_(), doubled

    net, x = Overwritten(), torch.randn(3, 4)
    found = optimize.capture(net, (torch.ones(3, 4),)).run([x])  # the example alone would not tell
    assert all(map(torch.equal, found, net(x)))


@pytest.mark.parametrize("target", ["onnx", "openvino"])
@pytest.mark.parametrize("size", [6, 7, 8])
def test_a_pool_rounds_up_where_that_adds_a_window_alone(size: int, target: str, tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            spread = functional.avg_pool2d(x, (2, 4), (3, 1), ceil_mode=True)
            return functional.max_pool2d(x, 2, 3, ceil_mode=True), spread

    net, x = Pooled(), torch.randn(2, 3, size, size)
    program = optimize.capture(net, (x,))
    pools = list(graph.calls(program.graph, graph.aten.max_pool2d.default, graph.aten.avg_pool2d.default))
    assert [graph.argument(pool, "ceil_mode") for pool in pools] == [size == 7] * 2
    found = optimize.export(program, target, tmp_path / f"net{find_target(target).suffix}").load()(x)
    for want, got in zip(net(x), found, strict=True):
        torch.testing.assert_close(got, want)


def test_an_input_that_is_written_and_returned_is_what_was_written() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x.mul_(2.0)
            return x.relu(), x

    x = torch.randn(2, 4)
    before = x.clone()
    program = optimize.capture(Doubled(), (x,))
    assert torch.equal(x, before)
    found = program.run((torch.tensor([[1.0, -1.0, 0.0, 3.0]]),))
    assert [value.tolist() for value in found] == [[[2, 0, 0, 6]], [[2, -2, 0, 6]]]


def test_a_slice_that_takes_all_is_what_it_reads() -> None:
    class Sliced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x[:, :, :8] + 1)[:, -9:, 1:]

    program = optimize.capture(Sliced(), (torch.zeros(2, 9, 8),))
    assert program.stats().ops == {"add": 1, "slice": 1}


@pytest.mark.parametrize("target", ["onnx", "openvino", "torchscript"])
def test_a_mean_that_counts_its_padding_and_rounds_up_is_exact(target: str, tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            both = functional.avg_pool2d(x, 3, 4, 1, ceil_mode=True), functional.avg_pool2d(x, (2, 3), 2, (0, 1), True)
            return *both, functional.avg_pool1d(x[:, :, 0], 3, 2, 1, ceil_mode=True)

    net, x = Pooled(), torch.randn(2, 3, 8, 8)
    program = optimize.capture(net, (x,))
    found = optimize.export(program, target, tmp_path / f"net{find_target(target).suffix}").load()(x)
    for want, read, got in zip(net(x), program(x), found, strict=True):
        torch.testing.assert_close(read, want)
        torch.testing.assert_close(got, want)


def convolutions(dimensions: int) -> nn.Module:
    """One convolution of each kind: strided and dilated, in groups, with padding in words, transposed."""
    kind, transposed = getattr(nn, f"Conv{dimensions}d"), getattr(nn, f"ConvTranspose{dimensions}d")
    return nn.Sequential(
        kind(4, 8, 3, stride=2, padding=1, dilation=2),
        kind(8, 8, 2, groups=4, bias=False, padding="same"),
        transposed(8, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
    ).eval()


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("kind", ["traced", "decomposed"])
def test_convolutions_of_other_graphs_are_those_of_the_module(kind: str, dimensions: int) -> None:
    net, x = convolutions(dimensions), torch.randn(2, 4, *[9] * dimensions)
    if kind == "traced":
        program = capture_torchscript(torch.jit.trace(net, x), (x,))
    else:
        program = capture_exported(torch.export.export(net, (x,)).run_decompositions())
    wanted = optimize.capture(net, x)
    layers = {f"conv{dimensions}d": 2, f"conv_transpose{dimensions}d": 1}
    assert count(program).ops.items() >= layers.items() and count(program).macs == count(wanted).macs > 0
    torch.testing.assert_close(program(x), net(x))


@pytest.mark.parametrize("name", references.each("resnet", "vit", "lstm"))
def test_a_traced_network_has_the_layers_of_its_module(name: str) -> None:
    net, x = references.network(name), REFERENCES[name].inputs()
    traced, wanted = (count(p) for p in (capture_torchscript(torch.jit.trace(net, x), (x,)), references.captured(name)))
    changed = {op for op in {**traced.ops, **wanted.ops} if traced.ops.get(op) != wanted.ops.get(op)}
    assert traced.macs == wanted.macs and changed <= {"slice", "zeros", "new_zeros"}, (traced.ops, wanted.ops)
