"""Lengths left free by name: encoders and recurrent layers, through capture, passes, every target, and the command."""

import contextlib
import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from torch import Tensor, nn

import optimize
from optimize.data import open_data
from optimize.datasets import open_datasets
from optimize.dimensions import read_dynamic
from optimize.errors import Refused, UsageError
from optimize.load.capturing import Capturing, capture_model
from optimize.measure.fleet import Fleet
from optimize.progress import silent
from optimize.quantization.batches import FlatBatches, sample_specs
from optimize.recipe import Recipe
from optimize.registry import find_target
from tests.nets import Called
from tests.slow import but_slowly

SEQUENCE = {"input_ids": {1: "sequence"}, "attention_mask": {1: "sequence"}}
NAMED = ("batch", "sequence")
Typed = Callable[..., subprocess.CompletedProcess[str]]


class Encoder(nn.Module):
    """A small BERT: tables of tokens and positions, layers that attend where the mask says so, two outputs."""

    def __init__(self, positions: int = 64, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(100, 32), nn.Embedding(positions, 32)
        self.register_buffer("ids", torch.arange(positions)[None])
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0, activation="gelu", batch_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).layers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.places(self.ids[:, :length])
        mask = (1 - attention_mask[:, None, None, :].to(x.dtype)) * -1e4
        mask = mask.expand(-1, 4, length, -1).reshape(-1, length, length)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        weights = attention_mask[..., None].to(x.dtype)
        return {"hidden": x, "embedding": (x * weights).sum(1) / weights.sum(1)}


class Shallow(Encoder):
    """The same without a layer, for what commands say and write."""

    def __init__(self) -> None:
        super().__init__(depth=0)


class Recurrent(nn.Module):
    """A bidirectional recurrent network over ``[N, T, 6]``."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(6, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Translator(nn.Module):
    """Two lengths: a GRU reads one sequence; another begins where it ended, writes the second, attends to the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 8)
        self.reader, self.writer = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, state = self.reader(self.words(source))
        written, _ = self.writer(self.words(target), state)
        seen = torch.softmax(written @ read.transpose(1, 2), dim=-1) @ read
        return self.head(torch.cat([written, seen], dim=-1))


class Thirds(nn.Module):
    """A sequence in three parts, whose last one is shorter where its length is no multiple of three."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = x.chunk(3, 1)
        return first.sum(1) - second.mean(1) * last.sum(1)


@pytest.mark.parametrize("target", ["torchscript", "onnx", "openvino"])
def test_a_free_length_is_cut_into_parts(target: str, tmp_path: Path) -> None:
    program = optimize.capture(Thirds().eval(), (torch.rand(2, 12, 5),), dynamic={"x": {1: "sequence"}})
    file = optimize.export(program, target, tmp_path / f"net{find_target(target).suffix}").load(threads=1)
    for length in (12, 7, 30):
        x = torch.rand(3, length, 5)
        assert np.allclose(file.run([x.numpy()])[0], Thirds()(x).numpy(), atol=1e-4)


def draw_text(batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[:, length - length // 3 :] = 0
    return torch.randint(0, 100, (batch, length), generator=generator), mask


@functools.cache
def _encoder() -> tuple[Encoder, optimize.Program]:
    net = Encoder().eval()
    return net, optimize.capture(net, draw_text(2, 16), dynamic=SEQUENCE)


def capture_encoder() -> tuple[Encoder, optimize.Program]:
    """Return an encoder and a copy of it captured, once for all tests."""
    net, program = _encoder()
    return net, program.clone()


def test_an_encoder_keeps_its_length_free_up_to_its_positions() -> None:
    net, program = capture_encoder()
    assert program.dynamic == ({0: "batch", 1: "sequence"}, {0: "batch", 1: "sequence"}) and program.batch == 2
    assert (program.free["sequence"].least, program.free["sequence"].most) == (1, 64)
    assert program.other_sizes() == [{"sequence": 32}, {"sequence": 9}]
    for batch, length in ((1, 1), (3, 7), (2, 64)):
        given = draw_text(batch, length)
        assert torch.allclose(program(*given)["hidden"], net(*given)["hidden"], atol=1e-5)
    assert program.sample(5)[0].shape == (5, 16)


@pytest.mark.parametrize("target", ["onnx", "openvino", "torchscript", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_file_of_every_runtime_answers_at_other_lengths_in_its_own_process(target: str, tmp_path: Path) -> None:
    if not (there := find_target(target).available()).run:
        pytest.skip(str(there))
    net, program = capture_encoder()
    merged = optimize.Pipeline([optimize.FuseConvBN()]).run(program).program
    artifact = optimize.export(merged, target, tmp_path / {"openvino": "net.xml"}.get(target, "net.file"))
    assert [spec.shape for spec in artifact.inputs] == [NAMED, NAMED]
    with Fleet([artifact], threads=1) as fleet:
        (session,) = fleet
        for batch, length in ((2, 16), (3, 33), (1, 7)):
            given = draw_text(batch, length)
            answers = session.outputs([value.numpy() for value in given])
            want = net(*given)["hidden"].detach().numpy()
            assert np.abs(answers[0] - want).max() < 1e-4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_their_length_free(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    net = Recurrent(kind).eval()
    program = optimize.capture(net, (torch.rand(2, 12, 6),), dynamic="time")
    assert program.dynamic == ({0: "batch", 1: "time"},) and len(program.graph.nodes) < 40
    for shape in ((1, 5, 6), (3, 40, 6)):
        x = torch.rand(shape)
        assert torch.allclose(program(x), net(x), atol=1e-6)
    assert program.export().module()(torch.rand(2, 31, 6))[0].shape == (2, 31, 3)
    if kind is nn.RNN:
        return  # its file is refused
    runner = optimize.export(program, "onnx", tmp_path / "net.onnx").load()
    for shape in ((1, 5, 6), (3, 40, 6)):
        x = torch.rand(shape)
        assert torch.allclose(torch.as_tensor(runner(x)), net(x), atol=1e-5)


def test_two_lengths_are_free_of_each_other(tmp_path: Path) -> None:
    net = Translator().eval()
    given = torch.randint(0, 50, (2, 9)), torch.randint(0, 50, (2, 6))
    program = optimize.capture(net, given, dynamic={"source": {1: "read"}, "target": {1: "written"}})
    assert program.dynamic == ({0: "batch", 1: "read"}, {0: "batch", 1: "written"})
    runner = optimize.export(program, "onnx", tmp_path / "net.onnx").load()
    given = torch.randint(0, 50, (3, 4)), torch.randint(0, 50, (3, 11))
    assert torch.allclose(torch.as_tensor(runner(*given)), net(*given), atol=1e-5)


def test_sizes_that_no_operator_ties_share_what_they_are_called() -> None:
    class Apart(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, y + 1

    program = optimize.capture(Apart().eval(), (torch.rand(2, 5), torch.rand(2, 5)), dynamic="length")
    assert len(program.symbols()) == 2 and "[batch, length]" in program.text()
    assert program.text().count("length") == 4


def test_a_length_that_the_code_computes_with_is_refused_with_its_line() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(x.shape[0], 8)
            for place in range(x.shape[1]):
                state = self.cell(x[:, place], state)
            return state

    with pytest.raises(Refused) as caught:
        optimize.capture(Unrolled().eval(), (torch.rand(2, 5, 6),), dynamic="time")
    assert "'time' cannot stay free: the model computes with its size of 5 as a constant in test_free" in str(
        caught.value
    )
    assert "(for place in range(x.shape[1]):)" in caught.value.what
    assert optimize.capture(Unrolled().eval(), (torch.rand(2, 5, 6),)).dynamic == ({0: "batch"},)
    with pytest.raises(Refused, match=r"every size of time: .* export 0/1 specialized due to hint of 1 .*shape\[1\]"):
        optimize.capture(nn.Conv2d(1, 2, 3), (torch.rand(2, 1, 5, 6),), dynamic="time")


@pytest.mark.parametrize("attends", [True, False])
def test_an_input_that_goes_along_with_a_free_length_is_named_where_it_is_forgotten(attends: bool) -> None:
    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if attends:
                return self.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]
            return (x * mask[..., None]).sum(1)

    mask = torch.zeros(2, 13, dtype=torch.bool)
    with pytest.raises(Refused) as told:
        optimize.capture(Along().eval(), (torch.rand(2, 13, 4), mask), dynamic="x:1=sequence")
    assert told.value.hint.endswith(
        "'mask', of the same size, goes along with it, say so: --dynamic x:1=sequence,mask:1=sequence."
    )
    assert "mark_dynamic" not in told.value.what


def test_a_range_beyond_what_the_model_takes_is_refused() -> None:
    with pytest.raises(Refused, match=r"'sequence' is asked for 4\.\.100; the model takes 1\.\.64"):
        optimize.capture(Shallow().eval(), draw_text(2, 16), dynamic="sequence:4..100")
    program = optimize.capture(Shallow().eval(), draw_text(2, 16), dynamic="sequence:4..40")
    assert (program.free["sequence"].least, program.free["sequence"].most) == (4, 40)


def test_a_table_of_positions_that_is_looked_up_bounds_the_length() -> None:
    net = Called(lambda m, x: x + m.places(torch.arange(x.shape[1])), places=nn.Embedding(40, 6)).eval()
    program = optimize.capture(net, (torch.rand(2, 32, 6),), dynamic="time")
    assert program.free["time"].most == 40 and program.free["time"].others == (40, 17)
    with pytest.raises(Refused, match=r"'x' has 41 for 'time', which may be 1\.\.40"):
        program(torch.rand(2, 41, 6))
    with pytest.raises(Refused, match=r"'x' has 41 for 'time', which may be 1\.\.40"):
        next(open_datasets(Recipe(), program, evaluate=(np.ones((3, 41, 6)), [0, 1, 0])).judged(program, 2, silent))
    with pytest.raises(Refused, match=r"'x' has 41 for 'time', which may be 1\.\.40"):
        next(iter(FlatBatches(program, open_data([torch.ones(3, 41, 6)], inputs=sample_specs(program)))))
    assert [note for note in program.notes if note.startswith("'time' may be 40 at most")]
    assert not optimize.capture(net, (torch.rand(2, 16, 6),), dynamic="time:2..40").notes


@pytest.mark.parametrize("offset", [0, 2])
def test_the_end_of_a_table_is_found_though_twice_the_example_is_within_it(offset: int) -> None:
    class LookedUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(9, 6), nn.Embedding(256, 6)

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1], device=x.device).unsqueeze(0) + offset
            return self.tokens(x) + self.places(places)

    text = torch.randint(9, (2, 32))
    program = optimize.capture(LookedUp().eval(), (text,), dynamic="sequence")
    assert program.free["sequence"].most == 256 - offset
    with pytest.raises(Refused, match=rf"is asked for 2\.\.512; the model takes 1\.\.{256 - offset}\."):
        optimize.capture(LookedUp().eval(), (text,), dynamic="sequence:2..512")
    for length, fits in ((256 - offset, True), (257 - offset, False)):
        with contextlib.nullcontext() if fits else pytest.raises(Refused, match=r"has 25. for 'sequence'"):
            program(torch.randint(9, (2, length)))


def test_multiples_alone_are_tried_where_the_model_takes_no_others() -> None:
    class Windows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], x.shape[1] // 8, 8).sum(-1)

    program = optimize.capture(Windows().eval(), (torch.rand(2, 16),), dynamic="time")
    assert program.free["time"].others == (32, 8)
    assert program.export().module()(torch.rand(3, 24))[0].shape == (3, 3)


def test_int8_keeps_lengths_free_and_is_judged_at_others(tmp_path: Path) -> None:
    net = Encoder(depth=1).eval()
    batches = [draw_text(8, length) for length in (31, 16, 23)]
    report = optimize.optimize(
        net, draw_text(2, 16), passes=[optimize.QuantizeStatic(calibration=batches)], targets="onnx", dynamic=SEQUENCE,
        out=tmp_path / "out", layer_timing=False,
    )  # fmt: skip
    row = next(row for row in report.rows if row.precision == "int8")
    assert row.status == "measured" and row.agreement is not None and row.agreement.sqnr_db > 20
    assert report.model.inputs[0] == "input_ids int64[batch, sequence]"
    # As long as the samples are, not as the example.
    assert "Times are those at sequence 23: at other sizes another file may be the fastest." in report.warnings


NET = ("tests.test_free_lengths:Shallow", "--input-shape", "16:int64;16:int64", "--to", "onnx", "--quiet")


@pytest.mark.parametrize(
    "said", but_slowly(["sequence", "input_ids:1=sequence:1..48,attention_mask:1=sequence:1..48"], {"sequence"})
)
def test_the_command_leaves_lengths_free_and_writes_them_down(said: str, tmp_path: Path, typed: Typed) -> None:
    done = typed(*NET, "--dynamic", said, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["model"]["inputs"][0] == "input_ids int64[batch, sequence]"
    assert report["rows"][0]["agreement"]["sqnr_db"] > 90
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert read_dynamic(recipe["dynamic"]) == read_dynamic(said)
    again = typed(*NET[:3], "--recipe", tmp_path / "out" / "recipe.yaml", "--out", tmp_path / "again", "--quiet")
    assert again.returncode == 0, again.stderr
    files = [next((tmp_path / folder).glob("*.onnx")).read_bytes() for folder in ("out", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dynamic", "ids:1=sequence"), "no input 'ids'"),
        (("--dynamic", "sequence:1..1000"), "asked for 1..1000; the model takes 1..64"),
        (("--dynamic", "2=sequence"), "No input has a dimension 2"),
        (("--dynamic", "input_ids:1=a", "--dynamic", "attention_mask:1=b"), "'a' and 'b' have one size"),
        (("--dynamic", "sequence["), "is no name of a dimension"),
    ],
)
def test_what_cannot_be_free_is_said_in_a_paragraph(
    words: tuple[str, ...], said: str, tmp_path: Path, typed: Typed
) -> None:
    done = typed(*NET, *words, "--out", tmp_path / "out")
    assert done.returncode in (1, 2) and said in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "out").exists()


def test_an_untrusted_file_is_captured_with_free_lengths_in_its_own_process(tmp_path: Path, typed: Typed) -> None:
    layers = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.ReLU()).eval()
    torch.save(layers, tmp_path / "net.pt")
    words = ("--dynamic", "time", "--to", "onnx", "--input-shape", "12:int64", "--quiet")
    done = typed(tmp_path / "net.pt", *words, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["model"]["inputs"] == ["input_1 int64[batch, time]"]


class Pooled(nn.Module):
    """Reads its length behind a recurrent layer, and attends there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.mix = layer, nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)[0]
        mixed = self.mix(found, found, found, need_weights=False)[0]
        return mixed.reshape(mixed.shape[0], mixed.shape[1], 4, 2).sum((1, 2)) / found.shape[1]


@pytest.mark.parametrize("target", ["onnx", "openvino"])
@pytest.mark.parametrize("layer", [nn.LSTM(8, 4, batch_first=True, bidirectional=True), nn.GRU(8, 8, batch_first=True)])
def test_a_length_behind_a_recurrent_layer_is_free_in_files(layer: nn.Module, target: str, tmp_path: Path) -> None:
    net = Pooled(layer).eval()
    program = optimize.capture(net, (torch.rand(2, 24, 8),), dynamic={"x": {1: "length"}})
    run = optimize.export(program, target, tmp_path / f"net{find_target(target).suffix}").load(threads=1)
    for shape in ((8, 48, 8), (3, 7, 8)):
        x = torch.rand(shape)
        with torch.no_grad():
            torch.testing.assert_close(run(x), net(x), atol=1e-5, rtol=1e-5)


def test_what_an_export_would_fix_is_refused(tmp_path: Path) -> None:
    net = Pooled(nn.RNN(8, 8, batch_first=True)).eval()
    program = optimize.capture(net, (torch.rand(2, 24, 8),), dynamic={"x": {1: "length"}})
    with pytest.raises(Refused, match=r"'length' cannot stay free in ONNX: .* a constant of it \(24\)"):
        optimize.export(program, "onnx", tmp_path / "net.onnx")
    program = optimize.capture(nn.RNN(8, 8).eval(), (torch.rand(24, 2, 8),))
    with pytest.raises(Refused, match=r"'batch' cannot stay free in ONNX: .* a constant of it \(24\)") as caught:
        optimize.export(program, "onnx", tmp_path / "net.onnx")
    assert "dynamic_batch=False" in caught.value.hint
    program = optimize.capture(nn.RNN(8, 8).eval(), (torch.rand(24, 2, 8),), dynamic_batch=False)
    assert optimize.export(program, "onnx", tmp_path / "net.onnx").path.exists()


def test_a_mask_of_zeros_is_not_what_files_are_judged_on() -> None:
    zeros = torch.zeros(2, 16, dtype=torch.long)
    ids, mask = capture_model(Encoder(depth=1).eval(), lambda _: (zeros, zeros), Capturing(dynamic=SEQUENCE)).inputs
    assert len(ids.unique()) > 5 and bool((mask == 1).all())


class Chosen(Encoder):
    """Makes truths of its mask first, and picks them by index, as transformers do."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        seen = attention_mask.to(torch.bool)[:, torch.arange(input_ids.shape[1])]
        return super().forward(input_ids, seen.to(torch.long) * input_ids.ne(-1))


def test_a_mask_of_truths_lets_everything_through_and_tokens_are_none() -> None:
    zeros = torch.zeros(2, 16, dtype=torch.long)
    ids, mask = capture_model(Chosen(depth=1).eval(), lambda _: (zeros, zeros), Capturing(dynamic=SEQUENCE)).inputs
    assert len(ids.unique()) > 5 and bool((mask == 1).all())


def test_outputs_are_chosen_by_name(tmp_path: Path, typed: Typed) -> None:
    net = Shallow().eval()
    program = optimize.capture(net, draw_text(2, 16), dynamic=SEQUENCE, outputs=("embedding",))
    assert program.output_names == ("embedding",)
    given = draw_text(3, 9)
    assert torch.allclose(program(*given)["embedding"], net(*given)["embedding"], atol=1e-5)
    done = typed(*NET, "--outputs", "embedding,hidden", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(next((tmp_path / "out").glob("*.onnx")))
    assert [value.name for value in session.get_outputs()] == ["embedding", "hidden"]
    done = typed(*NET, "--outputs", "embeddings", "--out", tmp_path / "other")
    assert done.returncode == 2 and "no output 'embeddings'" in done.stderr and "'embedding'" in done.stderr


def test_names_must_be_of_this_model() -> None:
    with pytest.raises(UsageError, match="no input 'ids'"):
        optimize.capture(Shallow().eval(), draw_text(2, 16), dynamic={"ids": {1: "sequence"}})
