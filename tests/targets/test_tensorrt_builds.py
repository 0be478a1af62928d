"""TensorRT-RTX engines of every reference network in float32, float16, INT8, and INT8 beside float16."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator

import onnxruntime
import pytest
import torch

import optimize
from models import REFERENCES
from optimize.passes.cast_half import CastFP16
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.base import Artifact
from optimize.targets.tensorrt import TensorRT, builder, packages
from tests import references
from tests.cpus import NEEDS_VNNI
from tests.nets import sqnr_db
from tests.targets.tensorrt_orders import rtx

Engine = Callable[[str, str], Artifact]
#: Layers with weights of each network, and its products of two activations, or of a loop, which stay in float.
WEIGHTED = {
    "resnet": (10, 0), "repvgg": (6, 0), "acnet": (4, 0), "diverse_branch": (4, 0), "mobilenetv3": (25, 0),
    "vit": (14, 6), "lstm": (1, 4), "unet": (13, 0),
}  # fmt: skip
PRODUCTS = ("convolution", "deconvolution", "matrix_multiply")


@pytest.fixture(autouse=True, scope="module")
def _built_here() -> Iterator[None]:
    """TensorRT-RTX builds on every machine, in this process: a child's start takes longer than the build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "has_gpu", lambda: False)
        patch.setattr(builder, "build_apart", builder.build)
        yield


def data(name: str) -> list[torch.Tensor]:
    return [REFERENCES[name].inputs(4, seed=seed) for seed in (1, 2)]


@functools.cache
def folded(name: str) -> Program:
    """Return a network merged before it is folded, which merges more of diverse_branch."""
    passes = [optimize.Reparameterize(), optimize.FuseConvBN()]
    return optimize.Pipeline(passes).run(references.captured(name)).program


@functools.cache
def program(name: str, precision: str) -> Program:
    if precision == "float32":
        return folded(name)
    if precision == "float16":
        return CastFP16(calibration=data(name)).apply(folded(name))[0]
    if precision == "int8":
        return QuantizeStatic(calibration=data(name), target="tensorrt").apply(folded(name))[0]
    return CastFP16(calibration=data(name), mixed=True).apply(program(name, "int8"))[0]


@pytest.fixture(scope="module")
def engine(_built_here: None, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Returns a function of a network and a precision: its engine, built once, in a folder of its own."""

    @functools.cache
    def built(name: str, precision: str) -> Artifact:
        return TensorRT().export(program(name, precision), tmp_path_factory.mktemp(name) / "net.engine")

    return built


@rtx
@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "int8-float16"])
@pytest.mark.parametrize("name", references.each("resnet", "vit", "lstm"))
def test_every_reference_network_is_built_without_a_warning(name: str, precision: str, engine: Engine) -> None:
    artifact = engine(name, precision)
    assert artifact.precision == precision
    assert artifact.path.read_bytes()[:4] == b"vtrt"
    assert artifact.size_bytes == artifact.path.stat().st_size
    assert {path.name for path in artifact.path.parent.iterdir()} == {"net.engine", "net.tensorrt.onnx"}
    assert not [note for note in artifact.notes if "warns" in note]
    assert artifact.layer_types is not None
    assert artifact.layer_types.source == "parsed network"
    weighted, others = WEIGHTED[name]
    found = Counter(layer.precision for layer in artifact.layer_types.layers if layer.op in PRODUCTS)
    assert sum(found.values()) == weighted + others
    beside = "float16" if "float16" in precision and name != "lstm" else "float32"
    wanted = {"float32": 0, "float16": 0, precision.partition("-")[0]: weighted}
    wanted[beside] += others
    assert found == {kind: number for kind, number in wanted.items() if number}


@rtx
@pytest.mark.parametrize(
    "precision, least_db",
    [
        ("float32", 80.0),
        ("float16", 40.0),
        pytest.param("int8", 25.0, marks=NEEDS_VNNI),  # the file has weights of 8 bits: it is for a GPU
        ("int8-float16", 25.0),
    ],
)
def test_the_onnx_file_beside_the_engine_agrees(precision: str, least_db: float, engine: Engine) -> None:
    artifact = engine("resnet", precision)
    x = REFERENCES["resnet"].inputs(3, seed=9)
    beside = artifact.path.with_name("net.tensorrt.onnx")
    session = onnxruntime.InferenceSession(beside, providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert sqnr_db(folded("resnet")(x), got) > least_db
    quantized = None if artifact.coverage is None else len(artifact.coverage.quantized)
    assert quantized == (10 if "int8" in precision else None)


@rtx
def test_what_an_engine_needs_elsewhere_is_noted(engine: Engine) -> None:
    artifact = engine("resnet", "int8")
    text = "\n".join(artifact.notes)
    assert artifact.versions["tensorrt-rtx"]
    assert "Parsed network: 9 convolution in int8, 1 matrix_multiply in int8;" in text
    assert re.search(r"tensorrt_rtx --onnx=net.tensorrt.onnx --saveEngine=net.engine .*--maxShapes=x:64x3x32x32", text)
    assert re.search(r"trtexec --onnx=net.tensorrt.onnx .*--stronglyTyped", text)
    assert "polygraphy run net.tensorrt.onnx --trt --onnxrt --strongly-typed" in text


@rtx
def test_int8_coverage_is_what_the_parser_reads(engine: Engine) -> None:
    artifact = engine("vit", "int8")
    assert artifact.coverage is not None
    assert len(artifact.coverage.quantized) == WEIGHTED["vit"][0]
    assert artifact.coverage.kernels == {} and artifact.coverage.source == "parsed network"
    assert [layer.op for layer in artifact.coverage.left_float] == ["matrix_multiply"] * WEIGHTED["vit"][1]
