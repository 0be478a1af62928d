import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import optimize
from models import REFERENCES
from optimize.cli.failures import quiet
from optimize.errors import InputsMisfit, Refused, UsageError, VerificationFailed
from optimize.frontend_graphs import capture_exported, capture_torchscript
from optimize.load import capturing
from optimize.load.capturing import Capturing, capture_model, capture_module
from tests import nets, references


@pytest.mark.parametrize("name", references.each("diverse_branch", "mobilenetv3", "vit", "lstm", "unet"))
def test_captured_program_equals_the_module_at_other_batches(name: str) -> None:
    module, program = REFERENCES[name].build(), references.captured(name, None)
    for batch in (1, 2, 5):
        x = REFERENCES[name].inputs(batch, seed=batch)
        assert torch.allclose(program(x), module(x), rtol=0, atol=1e-6)
    program.check()


def test_a_module_that_writes_to_its_inputs_is_captured() -> None:
    class Normalizing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sub_(0.5).div_(2.0).sum(1)

    given, x = torch.ones(2, 3), torch.arange(15.0).reshape(5, 3)
    program = optimize.capture(Normalizing().eval(), (given,))
    assert torch.equal(given, torch.ones(2, 3)) and torch.equal(program.inputs[0], given)
    assert torch.equal(program(x.clone()), (x - 0.5).div(2.0).sum(1))


def test_structures_and_keyword_arguments_survive() -> None:
    class Structured(nn.Module):
        def forward(self, x: torch.Tensor, *, pair: dict[str, torch.Tensor]) -> dict[str, object]:
            return {"sum": x + pair["a"], "rest": [pair["b"], (x,)]}

    x, a, b = torch.rand(3, 2, 4), torch.rand(3, 2, 4), torch.rand(3, 1)
    program = optimize.capture(Structured(), (x,), {"pair": {"a": a, "b": b}})
    result = program(x, pair={"a": a, "b": b})
    assert torch.equal(result["sum"], x + a)
    assert torch.equal(result["rest"][1][0], x)


def test_program_owns_its_weights_and_leaves_the_module_alone() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    before = copy.deepcopy(module.state_dict())
    program = optimize.capture(module, (torch.rand(2, 3, 8, 8),))
    for tensor in program.graph_module.parameters():
        tensor.zero_()
    assert all(torch.equal(module.state_dict()[key], before[key]) for key in before)
    assert module[0].weight.requires_grad


def test_batch_of_one_is_doubled_so_that_the_batch_stays_free() -> None:
    program = optimize.capture(nn.Linear(3, 2).eval(), (torch.rand(1, 3),))
    assert program.batch == 2
    assert program(torch.rand(7, 3)).shape == (7, 2)


def test_training_mode_of_the_root_is_captured_as_evaluation_and_said() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    program = optimize.capture(module, (torch.rand(2, 3, 8, 8),))
    assert module.training
    assert any("training mode" in note for note in program.notes)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(program(x), copy.deepcopy(module).eval()(x))


def test_batch_statistics_keep_their_meaning() -> None:
    net = nets.BatchStatistics().eval()
    net.trained.train()
    program = optimize.capture(net, (torch.rand(2, *nets.INPUT),))
    x = torch.rand(5, *nets.INPUT)
    assert torch.allclose(program(x), net(x), atol=1e-6)
    program.check()


@pytest.mark.parametrize("kernel, padding", [(3, "same"), (4, "same"), (3, "valid")])
def test_named_paddings_become_numbers(kernel: int, padding: str) -> None:
    net = nn.Conv2d(2, 3, kernel, padding=padding, dilation=2).eval()
    program = optimize.capture(net, (torch.rand(2, 2, 12, 9),))
    x = torch.rand(3, 2, 12, 9)
    assert torch.allclose(program(x), net(x), atol=1e-6)
    assert "padding" not in program.text()


def test_wrong_inputs_are_refused_with_the_expected_shape() -> None:
    program = optimize.capture(nn.Linear(3, 2).eval(), (torch.rand(2, 3),))
    with pytest.raises(Refused, match=r"must have shape \['batch', 3\]; got \[2, 4\]"):
        program(torch.rand(2, 4))
    with pytest.raises(Refused, match=r"must be torch.float32"):
        program(torch.rand(2, 3).double())
    with pytest.raises(Refused, match=r"takes 1 input"):
        program(torch.rand(2, 3), torch.rand(2, 3))


def test_data_dependent_control_flow_is_refused() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(Refused, match=r"torch\.export cannot capture .* in test_frontend\.py:\d+ \(return x \+ 1 if"):
        optimize.capture(Branching(), (torch.rand(2, 3),))


def test_packed_sequences_are_refused_with_what_to_do() -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.lstm(packed)[1][0][-1]  # type: ignore[no-any-return]

    with pytest.raises(Refused, match=r"Sequences are packed in test_frontend\.py:\d+ \(return self\.lstm") as caught:
        optimize.capture(Packing().eval(), (torch.rand(2, 5, 3), torch.tensor([5, 3])))
    assert "torch.gather" in caught.value.hint


@pytest.mark.parametrize("debug", [True, False])
def test_a_module_that_computes_with_its_batch_keeps_it_and_says_where(debug: bool) -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(2, -1) @ torch.ones(12, 1)

    with quiet(debug=debug):  # as a command keeps what libraries say to itself
        program = optimize.capture(Fixed().eval(), (torch.rand(2, 3, 4),))
    assert program.batch is None and program.inputs[0].shape == (2, 3, 4)
    (note,) = program.notes
    assert note.startswith("The batch stays fixed to 2: the model computes with 2 as a constant in test_frontend.py:")
    assert note.endswith("(return x.reshape(2, -1) @ torch.ones(12, 1)).")


def test_a_batch_of_one_that_the_model_computes_with_is_not_doubled() -> None:
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(12) * 2 if len(x) == 1 else x.reshape(-1)[: 12 * int(str(len(x)))]

    program = optimize.capture(One().eval(), (torch.rand(1, 3, 4),))
    assert program.batch is None and program.inputs[0].shape == (1, 3, 4)


def test_a_module_that_takes_one_sample_alone_keeps_it() -> None:
    class Alone(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(12) * 2

    program = optimize.capture(Alone().eval(), (torch.rand(1, 3, 4),))
    assert program.inputs[0].shape == (1, 3, 4)
    assert program.notes == ["The batch stays fixed to 1: the model fails on a batch of 2."]
    opened = capture_model(Alone().eval(), lambda _: (torch.rand(2, 3, 4),), Capturing())
    assert opened.inputs[0].shape == (1, 3, 4) and opened.notes == program.notes
    with pytest.raises(Refused, match=r"fails on x float32\[2, 3, 5\].*\nCheck --input-shape"):
        capture_model(Alone().eval(), lambda _: (torch.rand(2, 3, 5),), Capturing())
    for shape, told in (((2, 8, 8, 3), True), ((2, 4, 8, 8), False)):
        with pytest.raises(Refused) as caught:
            optimize.capture(nn.Conv2d(3, 4, 1), (torch.rand(shape),))
        assert ("Channels seem to be last" in caught.value.hint) is told


def test_rows_that_others_point_at_are_no_samples() -> None:
    def gather(m: nn.Module, x: torch.Tensor, *ends: torch.Tensor) -> torch.Tensor:
        sources, sinks = ends
        return torch.zeros(x.shape[0], 4).index_add(0, sinks, m.linear(x)[sources])

    net = nets.Called(gather, linear=nn.Linear(3, 4)).eval()
    ends = torch.tensor([0, 7, 9, 3, 2]), torch.tensor([9, 1, 8, 0, 4])
    program = optimize.capture(net, (torch.randn(10, 3), *ends))
    assert program.batch is None
    assert program.notes == [
        "The batch stays fixed to 10: other inputs point at its rows, as edges at the nodes of a graph, and a part of "
        "them is no input."
    ]
    said = optimize.capture(net, (torch.randn(10, 3), *ends), dynamic={"x": {0: "nodes"}})
    assert said.dynamic[0] and not said.notes  # who says that they are many knows what they are
    quantized, _ = optimize.QuantizeStatic(calibration=[(torch.randn(10, 3), *ends)]).apply(program)
    assert quantized.quantization is not None


@pytest.mark.parametrize(
    ("compute", "inputs", "why"),
    [
        (lambda m, x, y: m.linear(x).diagonal_scatter(y), [(5, 5), (5,)], "the model fails on batches of 6, 10"),
        (lambda m, x: m.linear(x)[torch.tensor([0, 3])], [(5, 5)], "the model points at its rows, as edges at the "),
    ],
)
def test_a_batch_of_which_no_other_runs_is_fixed(
    compute: Callable[..., torch.Tensor], inputs: list[tuple[int, ...]], why: str
) -> None:
    net = nets.Called(compute, linear=nn.Linear(5, 5)).eval()
    program = optimize.capture(net, [torch.randn(shape) for shape in inputs])
    assert program.batch is None and len(program.notes) == 1
    assert program.notes[0].startswith(f"The batch stays fixed to 5: {why}")


def test_graphs_of_torch_itself_are_captured_as_they_are_held() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.ReLU())
    x, scripted = torch.randn(5, 3), torch.jit.script(net)
    exported = torch.export.export(net.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for held, args, kwargs in (
        (scripted, (x,), {}),
        (scripted, (), {"input": x}),
        (torch.jit.trace(net, x), (x,), {}),
        (exported, None, None),
        (exported, (x[:3],), None),
    ):
        program = optimize.capture(held, args, kwargs)
        assert program.batch in (3, 5) and torch.equal(program(x[:2]), net(x[:2]))
        with pytest.raises(UsageError, match="Sizes besides the batch are left free in eager modules only"):
            optimize.capture(held, args, kwargs, dynamic_size=True)
    assert scripted.training  # is the caller's, as it was
    with pytest.raises(UsageError, match=r"no input data\.\nKnown: input"):
        optimize.capture(scripted, kwargs={"data": x})
    with pytest.raises(UsageError, match="needs example inputs"):
        optimize.capture(scripted)
    with pytest.raises(Refused, match="The layer '0' \\(RecursiveScriptModule\\) is TorchScript, which is no part"):
        optimize.capture(nn.Sequential(scripted, nn.Linear(4, 2)), x)


def test_examples_may_be_more_than_a_batch_is_bounded_by() -> None:
    program = optimize.capture(nn.Linear(3, 2).eval(), (torch.randn(5000, 3),))
    assert program.batch == 5000 and program.free["batch"].most == 5000 and not program.notes
    assert program.sample(2)[0].shape == (2, 3)


def test_a_bound_of_the_batch_is_found_and_kept() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.rand(64, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.rows[: x.shape[0]]

    program = optimize.capture(Rows().eval(), (torch.rand(2, 3),))
    assert program.batch == 2 and program.free["batch"].most == 64
    assert [note for note in program.notes if note.startswith("'batch' may be 64 at most")]
    assert program.export().range_constraints.popitem()[1].upper == 64


def test_exported_program_is_freed_where_its_graph_allows() -> None:
    net = REFERENCES["resnet"].build().eval()
    program = capture_exported(torch.export.export(net, (REFERENCES["resnet"].inputs(1),)))
    x = REFERENCES["resnet"].inputs(3)
    assert torch.allclose(program(x), net(x), atol=1e-6)


def test_exported_lstm_with_a_fixed_state_keeps_its_batch() -> None:
    """Freeing it would abort the process inside the kernel at another batch."""
    net = REFERENCES["lstm"].build().eval()
    program = capture_exported(torch.export.export(net, (REFERENCES["lstm"].inputs(2),)))
    assert program.batch is None
    assert any("stays fixed" in note for note in program.notes)


def test_torchscript_is_captured_again_or_refused() -> None:
    net = REFERENCES["repvgg"].build().eval()
    program = capture_torchscript(torch.jit.script(net), (REFERENCES["repvgg"].inputs(2),))
    x = REFERENCES["repvgg"].inputs(3)
    assert torch.allclose(program(x), net(x), atol=1e-6)
    with pytest.raises(Refused, match="cannot be captured again"):
        capture_torchscript(torch.jit.script(REFERENCES["unet"].build().eval()), (REFERENCES["unet"].inputs(2),))


def test_outputs_that_are_no_tensors_are_refused_by_position() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            return x + 1, 0.5

    with pytest.raises(Refused, match=r"Output 1 of the model is 0\.5"):
        optimize.capture(Mixed(), torch.rand(2, 3))


def test_a_generator_made_in_forward_is_refused() -> None:
    class Drawn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.shape[1], generator=torch.Generator().manual_seed(0))

    with pytest.raises(Refused, match="computes with a Generator, which no file holds"):
        optimize.capture(Drawn(), (torch.ones(2, 3),))


def test_a_buffer_that_is_written_on_every_call_is_said() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * 2

    module = Counter().eval()
    assert any("'calls'" in note for note in optimize.capture(module, torch.rand(2, 3)).notes)
    assert module.calls == 0, "the caller's module was called"


class Tally(nn.Module):
    """Counts its calls in a buffer that lies in memory once for many, and answers with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("ones", torch.ones(1, 3).expand(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls + self.ones[0]


def test_a_number_that_a_script_counts_in_is_said() -> None:
    """After 200 calls it answered otherwise than the artifact that was proved equal."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return -x if self.calls > 200 else x + 0

    program = capture_torchscript(torch.jit.script(Counting()), (torch.randn(2, 3),))
    assert "The model sets its 'calls' on every call; the files keep the value it had at capture." in program.notes


def test_what_the_first_call_writes_is_written_back_in_every_form_of_a_model() -> None:
    x = torch.rand(2, 3)
    exported, scripted = torch.export.export(Tally(), (x,)), torch.jit.trace(Tally(), x, check_trace=False)
    scripted.calls.zero_()
    for program in (optimize.capture(Tally(), x), capture_exported(exported), capture_torchscript(scripted, (x,))):
        assert torch.equal(program(x), x + 1)
        assert any("'calls'" in note for note in program.notes)


def test_a_buffer_that_grows_is_refused() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x])
            return x + self.seen.mean(0)

    with pytest.raises(Refused, match=r"torch\.export cannot capture"):
        optimize.capture(Growing(), torch.rand(2, 3))


def test_what_is_overwritten_through_dropout_is_read_so_in_exported_programs_too() -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x - 0.5
            with torch.no_grad():
                return torch.relu_(nn.functional.dropout(y, training=self.training)) + y

    x = torch.rand(2, 3)
    for exported in (torch.export.export(Dropped().eval(), (x,)), torch.jit.trace(Dropped().eval(), x)):
        is_script = isinstance(exported, torch.jit.ScriptModule)
        program = capture_torchscript(exported, (x,)) if is_script else capture_exported(exported)
        assert torch.equal(program(x), Dropped().eval()(x))


def test_graphs_that_may_be_called_or_not_are_refused() -> None:
    class Choosing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(Refused, match="calls cond, which chooses"):
        optimize.capture(Choosing(), torch.rand(2, 3))


def test_inputs_that_do_not_fit_are_told_apart_from_what_export_lacks() -> None:
    with pytest.raises(
        Refused, match=r"fails on input float64\[2, 3\]: .*\nCheck the example inputs: .*x\.float"
    ) as told:
        optimize.capture(nn.Linear(3, 2).eval(), torch.rand(2, 3).double())
    assert "--" not in told.value.hint and isinstance(told.value, InputsMisfit)
    with pytest.raises(Refused, match=r"fails on .*\nLeave the batch out of the sizes: 3,8,9\. Check"):
        optimize.capture(nn.Conv2d(3, 2, 3).eval(), torch.rand(2, 1, 3, 8, 9))


class OfTokens(nn.Module):
    """Takes tokens, and a mask of truths alone, of which one must be True."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(100, 4), nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        seen = self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
        return (seen * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("tokens", "mask", "match"),
    [
        (
            1400,
            torch.bool,
            r"in the layer 'embed' .*\nTokens go up to 1,400, and the table has 100 rows: is it this model",
        ),
        (99, torch.int64, r"fails on tokens int64\[2, 3\], mask int64\[2, 3\] .*\n'mask' is int64: .*\(mask != 0\)"),
    ],
)
def test_what_is_wrong_with_tokens_and_masks_is_told(tokens: int, mask: torch.dtype, match: str) -> None:
    with pytest.raises(Refused, match=match):
        optimize.capture(OfTokens().eval(), (torch.full((2, 3), tokens), torch.ones(2, 3, dtype=mask)))


@pytest.mark.parametrize("mask", [torch.zeros(2, 3, dtype=torch.bool), torch.tensor([[1, 1, 0], [1, 1, 1]])])
def test_a_mask_that_a_command_draws_or_texts_make_is_one_that_the_model_takes(mask: torch.Tensor) -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    program = capture_model(OfTokens().eval(), lambda _: (tokens, mask), Capturing())
    assert program.inputs[1].dtype is torch.bool and bool(program.inputs[1].any())


class Counted(nn.Module):
    """Adds to a float what comes of whole numbers that no table reads: places in something, or no places at all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(size))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x + self.table[places] + (places // 7)


@pytest.mark.parametrize(("size", "most"), [(200, 100), (12, 10), (2, 2), (1, 1)])
def test_whole_numbers_that_no_table_reads_are_drawn_as_far_as_the_model_takes_them(size: int, most: int) -> None:
    zeros = torch.zeros(4, 6, dtype=torch.int64)
    program = capture_model(Counted(size).eval(), lambda _: (torch.rand(4, 6), zeros), Capturing())
    assert most // 2 <= int(program.inputs[1].max()) < most


def test_pictures_of_bytes_are_no_masks() -> None:
    """Of ones alone nothing would be told that a file does to a picture."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    net.register_forward_pre_hook(lambda _, given: (given[0].float() / 255,))
    program = capture_model(net.eval(), lambda _: (torch.zeros(4, 3, 4, 4, dtype=torch.uint8),), Capturing())
    assert int(program.inputs[0].max()) > 200 and int(program.inputs[0].min()) < 50


def test_a_part_left_in_training_mode_is_said() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    net[1].train()
    assert any(
        "training mode" in note and "'1'" in note for note in optimize.capture(net, torch.rand(2, 3, 8, 8)).notes
    )


@pytest.mark.parametrize("dynamic", [True, False])
def test_work_is_counted_for_one_sample_recurrent_layers_too(dynamic: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval()
    assert optimize.capture(net, torch.rand(4, 8), dynamic_batch=dynamic).stats().macs == 8 * 16
    lstm = optimize.capture(REFERENCES["lstm"].build().eval(), REFERENCES["lstm"].inputs(2), dynamic_batch=dynamic)
    layers = 28 * (4 * 64 * (28 + 64) + 4 * 64 * (64 + 64))  # rows x gates x (input + state), two layers
    assert lstm.stats().macs == layers + 64 * 10


def _weight_norm(conv: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(conv)


@pytest.mark.parametrize(
    "parametrize",
    [
        _weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        lambda conv: prune.l1_unstructured(conv, "weight", 0.5),
    ],
)
def test_weights_that_hooks_compute_are_captured_and_stay_the_users(parametrize: Callable[[nn.Module], object]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    parametrize(net[0])
    x = torch.randn(2, 3, 8, 8)
    net(x)
    before = [tensor.detach().clone() for tensor in net.parameters()]
    expected = net.eval()(x)
    program = optimize.capture(net, (x,))
    assert torch.equal(program(x), expected)
    folded, _ = optimize.FuseConvBN().apply(program)
    assert sorted(folded.graph_module.state_dict()) == ["0.bias", "0.weight"]
    assert torch.allclose(folded(x), expected, atol=1e-5)
    assert all(torch.equal(one, two) for one, two in zip(before, net.parameters(), strict=True))


def test_a_transformer_with_a_mask_is_captured_without_a_look_at_it() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x, mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1))

    net, x = Scored().eval(), torch.randn(3, 5, 8)
    torch.testing.assert_close(optimize.capture(net, (x[:2],))(x), net(x))


@pytest.mark.parametrize(("reads", "hidden", "told"), [("all", 3, True), ("all", 0, True), ("shown", 3, False)])
def test_an_encoder_that_writes_zeros_where_its_mask_hides_is_captured_without_and_told(
    reads: str, hidden: int, told: bool
) -> None:
    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(block, 1)

        def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
            shown = ~pad[..., None] if reads == "shown" else torch.ones_like(x)
            return (self.encoder(x, src_key_padding_mask=pad) * shown).sum(1) / shown.sum(1)

    net, x, pad = Texts().eval(), torch.rand(3, 6, 8), torch.arange(6).expand(3, 6) >= 6 - hidden
    program = optimize.capture(net, (x, pad))
    padded = torch.arange(6).expand(3, 6) > 3
    assert torch.allclose(program(x, padded), net(x, padded), atol=1e-5), "as with gradients"
    assert [note.startswith("Under torch.no_grad() nn.TransformerEncoder (encoder)") for note in program.notes] == (
        [True] if told else []
    )
    assert net.encoder.use_nested_tensor


class KeepsAnchors(nn.Module):
    """Makes its anchors again where the shape is not that of the call before, as YOLO's heads do."""

    shape: object = None

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.conv(x)
        if self.shape != found.shape:
            self.anchors = torch.arange(found.shape[-1], dtype=found.dtype) / 8
            self.shape = found.shape
        return found * self.anchors


@pytest.mark.parametrize("called", [0, 1, 2])
def test_what_a_call_keeps_of_its_shape_does_not_bind_the_batch(called: int) -> None:
    net = KeepsAnchors().eval()
    if called:
        net(torch.rand(called, 3, 8, 8))
    kept = net.shape
    program = optimize.capture(net, (torch.rand(2, 3, 8, 8),))
    assert program.batch == 2 and not program.notes and net.shape == kept
    x = torch.rand(5, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], net(x))


@pytest.mark.parametrize("name", ["graph", "code", "meta", "graph_"])
def test_a_part_may_be_called_what_a_graph_module_calls_its_own(name: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
            self.head = nn.Conv2d(8, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(getattr(self, name)(x))

    module, x = Named().eval(), torch.rand(3, 3, 8, 8)
    program = optimize.capture(module, (x,))
    fused = optimize.Pipeline([optimize.FuseConvBN()]).run(program)
    assert fused.steps[0].outcome.rewrites[0].where == f"{name}.1"
    assert torch.allclose(fused.program(x), module(x), atol=1e-6)
    pruned, _ = optimize.PruneChannels(0.5).apply(program)
    thin = optimize.narrow(module, pruned)
    assert len(thin.state_dict()[f"{name}.0.weight"]) == 4


def test_what_cannot_be_captured_is_not_captured_again_with_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if bool(x.sum() > 0) else x

    asked = []
    monkeypatch.setattr(capturing, "capture_module", lambda *given: asked.append(given) or capture_module(*given))
    with pytest.raises(Refused):
        capture_model(Deciding().eval(), lambda _: (torch.rand(2, 3),), Capturing())
    assert len(asked) == 1


def test_torchscript_is_held_against_itself() -> None:
    """What asks in which mode it runs was captured in one, and measured in another."""

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh() if x.is_inference() else x * 3

    with pytest.raises(VerificationFailed, match="answers otherwise than its runtime"):
        capture_model(torch.jit.script(Asking().eval()), lambda _: (torch.rand(2, 3),), Capturing())
