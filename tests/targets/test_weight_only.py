"""Weights alone in integers on ONNX Runtime, OpenVINO and TorchScript: a file's answers, its size, what it says."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import optimize
from optimize.errors import Refused
from optimize.program import Program
from optimize.targets.base import Artifact
from optimize.targets.onnx.runner import import_runtime, keep_optimized, open_session, session_options
from tests import fresh
from tests.nets import sqnr_db
from tests.passes.test_quantize_weights import capture, language, rounded
from tests.slow import but_slowly
from tests.targets.scripted import draw

TARGETS = ("onnx", "torchscript", "openvino")
#: Integer products at run time and the bfloat16 of torch, against float arithmetic on the rounded weights.
LEAST_DB = {"onnx": 40, "torchscript": 44, "openvino": 40}
#: Where blocks do not fill a row OpenVINO unpacks the integers when it opens the file.
IN_FLOAT = "OpenVINO executes it in f32"


def exported(program: Program, target: str, folder: Path, name: str = "net") -> Artifact:
    return optimize.export(program, target, folder / f"{name}.{'xml' if target == 'openvino' else target}")


#: The language model is written in each of these on each target, and one process a target runs all its files.
OPTIONS = [{"bits": 8}, {"bits": 6}, {"bits": 4}, {"bits": 4, "group": 128}, {"bits": 3}, {"bits": 2}]
TOKENS = torch.randint(0, 300, (5, 7), generator=torch.Generator().manual_seed(0))


@functools.cache
def language_of(bits: int, group: int | None = None, *, tied: bool = False) -> Program:
    """Return the language model rounded, once for all targets."""
    return rounded(language(tied=tied), bits=bits, group=group)[0]


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[Artifact, Tensor]]]:
    """Returns a function of a target: the file of each of ``OPTIONS``, with its answers in a fresh process."""

    @functools.cache
    def of(target: str) -> list[tuple[Artifact, Tensor]]:
        folder = tmp_path_factory.mktemp(target)
        artifacts = [
            exported(language_of(**options), target, folder, f"net{number}") for number, options in enumerate(OPTIONS)
        ]
        found = fresh.answers(folder, [(artifact.path, TOKENS) for artifact in artifacts])
        return list(zip(artifacts, found, strict=True))

    return of


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", but_slowly(OPTIONS, [{"bits": 6}, {"bits": 3}]), ids=str)
def test_a_language_model_answers_as_its_program_in_a_fresh_process(
    target: str, options: dict[str, Any], languages: Callable[[str], list[tuple[Artifact, Tensor]]]
) -> None:
    program, blocks = language_of(**options), options.get("group", 32)
    artifact, alone = languages(target)[OPTIONS.index(options)]
    assert artifact.precision == f"int{options['bits']}-weights"
    assert artifact.coverage is not None
    padded = {layer.name for layer in artifact.coverage.left_float if layer.reason == IN_FLOAT}
    assert len(padded) == len(artifact.coverage.left_float) == (4 if target == "openvino" and 96 % blocks else 0)
    paths = [name.removesuffix("_1") for name in artifact.coverage.quantized if name not in padded]
    named = ["embed", "encoder.self_attn", "encoder.self_attn", "encoder.linear1", "encoder.linear2", "head"]
    assert paths == [name for name in named if name not in padded]
    runner = artifact.load(threads=1)
    for tokens in (TOKENS[:1], TOKENS):
        assert sqnr_db(program(tokens), runner(tokens)) > LEAST_DB[target]
    assert sqnr_db(program(TOKENS), alone) > LEAST_DB[target]


def test_openvino_names_the_layers_of_attention_that_it_multiplies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    net = nn.Sequential(nn.Embedding(300, 256), encoder, nn.Linear(256, 300)).eval()
    program, _ = rounded(capture(net, torch.zeros(2, 16, dtype=torch.int64)), bits=4)
    artifact = exported(program, "openvino", tmp_path)
    assert artifact.coverage is not None and artifact.coverage.left_float == ()
    assert artifact.coverage.kernels["FullyConnected@u4"] == 5 and artifact.coverage.kernels["Gather@u4"] == 1
    assert any("DYNAMIC_QUANTIZATION_GROUP_SIZE=0" in note for note in artifact.notes)


@pytest.mark.parametrize("target", TARGETS)
def test_the_file_is_about_a_quarter_or_a_seventh(target: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1000))
    program = capture(net, torch.randint(0, 1000, (2, 3)))
    size = exported(program, target, tmp_path).size_bytes
    for bits, ratio in ((8, 3.85), (4, 6.7), *(((3, 8.8), (2, 12)) if target == "onnx" else ())):
        assert size / exported(rounded(program, bits=bits)[0], target, tmp_path).size_bytes > ratio


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_an_onnx_file_holds_the_bits_and_the_runtime_its_kernels_integers(bits: int, tmp_path: Path) -> None:
    program, _ = rounded(capture(nn.Linear(210, 100), draw(4, 210)), bits=bits)
    artifact, run = exported(program, "onnx", tmp_path), tmp_path / "run.onnx"
    stored = [numpy_helper.to_array(entry) for entry in onnx.load(artifact.path).graph.initializer]
    integers, scales = 100 * 224 * bits / 8, 100 * 7 * 2
    assert integers <= sum(array.nbytes for array in stored) - scales - 400 < 1.02 * integers + 500
    options = session_options(import_runtime(), threads=1)
    keep_optimized(options, run)
    open_session(import_runtime(), str(artifact.path), options)
    kernels = [node for node in onnx.load(run).graph.node if node.op_type != "Add"]
    assert [node.op_type for node in kernels] == ["MatMulNBits"], "unpacking is done when it is opened"
    held = {attribute.name: attribute.i for attribute in kernels[0].attribute}
    assert (held["bits"], held["block_size"]) == (4 if bits < 4 else 8, 32)


@pytest.mark.parametrize(
    ("target", "bits"), [("onnx", 4), ("torchscript", 4), ("torchscript", 8), ("openvino", 4), ("openvino", 8)]
)
def test_a_shared_weight_is_stored_once(target: str, bits: int, tmp_path: Path) -> None:
    shared = language_of(bits, tied=True)
    larger, artifact = exported(language_of(bits), target, tmp_path, "apart"), exported(shared, target, tmp_path)
    assert larger.size_bytes - artifact.size_bytes >= 300 * 96 * bits // 8 - 100
    tokens = torch.randint(0, 300, (3, 7))
    assert sqnr_db(shared(tokens), artifact.load(threads=1)(tokens)) > LEAST_DB[target]


class Linears(nn.Module):
    """Linear layers of awkward shapes, each on the first values of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in ((10, 1), (13, 3), (33, 17), (100, 40), (256, 64)))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x[..., : layer.in_features]) for layer in self.layers]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("target", TARGETS)
def test_odd_shapes_are_padded(target: str, bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program, _ = rounded(capture(Linears(), draw(2, 3, 256)), bits=bits)
    artifact = exported(program, target, tmp_path)
    assert artifact.coverage is not None
    assert len(artifact.coverage.quantized) == (1 if target == "openvino" else 5)
    for batch in (1, 4):
        x = draw(batch, 3, 256, seed=5)
        for want, got in zip(program(x), artifact.load(threads=1)(x), strict=True):
            assert sqnr_db(want, got) > 30


class Tables(nn.Module):
    """Embeddings of awkward widths, all read at the same places."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, width) for width in (1, 7, 70, 128))

    def forward(self, indices: Tensor) -> list[Tensor]:
        return [table(indices) for table in self.tables]


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 8, "group": 64}, {"bits": 4, "group": 0}], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_embeddings_are_exact(target: str, options: dict[str, int], tmp_path: Path) -> None:
    program, _ = rounded(capture(Tables(), torch.zeros(2, 3, dtype=torch.int64)), **options)
    artifact = exported(program, target, tmp_path)
    indices = torch.arange(18).reshape(6, 3)
    for want, got in zip(program(indices), artifact.load(threads=1)(indices), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_a_torchscript_file_runs_on_another_instruction_set(capability: str, tmp_path: Path) -> None:
    """The kernel's packed layout is another there: a file that held it would answer garbage."""
    linear = capture(nn.Linear(96, 80), draw(2, 96))
    programs = [rounded(linear, bits=bits)[0] for bits in (8, 4)]
    files = [exported(program, "torchscript", tmp_path, f"net{number}") for number, program in enumerate(programs)]
    x = draw(5, 96, seed=1)
    answers = fresh.answers(tmp_path, [(file.path, x) for file in files], ATEN_CPU_CAPABILITY=capability)
    assert all(
        sqnr_db(program(x), got) > LEAST_DB["torchscript"] for program, got in zip(programs, answers, strict=True)
    )


def test_onnx_multiplies_integers_and_keeps_no_float_table(tmp_path: Path) -> None:
    artifact = exported(language_of(4, tied=True), "onnx", tmp_path)
    assert artifact.coverage is not None
    assert artifact.coverage.kernels["MatMulNBits"] == 5 and artifact.coverage.kernels["GatherBlockQuantized"] == 1
    stored = onnx.load(artifact.path).graph.initializer
    floats = [np.prod(entry.dims) for entry in stored if entry.data_type == onnx.TensorProto.FLOAT]
    assert max(floats) <= 600, "scales and biases alone"


class Mixed(nn.Module):
    """A convolution, a recurrent layer, a small and a large linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(8, 8, 3), nn.LSTM(8, 8, batch_first=True)
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.small(self.rnn(self.conv(x).transpose(1, 2))[0]))


@pytest.mark.parametrize("target", TARGETS)
def test_coverage_names_everything_left_in_float(target: str, tmp_path: Path) -> None:
    program, _ = rounded(capture(Mixed(), draw(2, 8, 12)), smallest=500, bits=4)
    coverage = exported(program, target, tmp_path).coverage
    assert coverage is not None
    reasons = {layer.name: layer.reason for layer in coverage.left_float}
    if target == "openvino":
        assert coverage.quantized == () and reasons.pop("large") == IN_FLOAT
    else:
        assert coverage.quantized == ("large",)
    assert set(reasons) == {"conv", "rnn", "small"}
    assert reasons["small"] == "its weight has 64 elements, fewer than 500: little to save"


def test_torch_makes_floats_of_wide_blocks_when_it_opens_the_file(tmp_path: Path) -> None:
    program, _ = rounded(capture(nn.Linear(250, 64), draw(2, 250)), bits=8, group=64)
    artifact, x = exported(program, "torchscript", tmp_path), draw(3, 250, seed=1)
    assert artifact.size_bytes < 0.45 * 4 * 64 * 250
    assert sqnr_db(program(x), artifact.load(threads=1)(x)) > 100


@pytest.mark.parametrize("target", ["eager", "tensorrt"])
def test_other_targets_refuse_with_a_hint(target: str, tmp_path: Path) -> None:
    program, _ = rounded(capture(nn.Linear(32, 8), draw(2, 32)))
    with pytest.raises(Refused) as refusal:
        exported(program, target, tmp_path)
    assert refusal.value.hint and not list(tmp_path.iterdir())
