"""INT8 mixed with bfloat16, and what a user may ask of OpenVINO's runner."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models import REFERENCES
from optimize.errors import UsageError
from optimize.passes.cast_half import CastBF16, CastFP16
from optimize.targets.openvino import OpenVINO
from optimize.targets.openvino.coverage import notes
from optimize.targets.openvino.runner import OpenVINORunner, usable_precision
from tests import references
from tests.cpus import HAS_VNNI
from tests.nets import sqnr_db
from tests.targets.programs import installed


@installed
@pytest.mark.parametrize("name", ["mobilenetv3", "vit"])
def test_floats_between_integer_layers_run_in_bfloat16_where_the_cpu_has_it(name: str, tmp_path: Path) -> None:
    from openvino import Core

    quantized = references.int8(name)
    mixed, _ = CastBF16(mixed=True).apply(quantized)
    artifact = OpenVINO().export(mixed, tmp_path / "net.xml")
    hint = usable_precision(Core(), "bf16")
    assert artifact.precision == "int8-bfloat16"
    assert "in u8" in artifact.notes[0] and f"in {hint}" in artifact.notes[0]
    assert any(f"INFERENCE_PRECISION_HINT={hint}" in note for note in artifact.notes)
    assert artifact.coverage is not None and mixed.quantization is not None
    assert len(artifact.coverage.quantized) == len(mixed.quantization.layers)
    x = REFERENCES[name].inputs(4, seed=9)
    assert sqnr_db(references.folded(name)(x), artifact.load(threads=1)(x)) > (28 if HAS_VNNI else 27)


@installed
def test_what_the_file_does_otherwise_than_planned_is_said(tmp_path: Path) -> None:
    quantized = references.int8("vit")
    mixed, _ = CastBF16(mixed=True).apply(quantized)
    assert mixed.quantization is not None and mixed.quantization.half is not None
    softmax = next(node.name for node in mixed.graph.nodes if node.op == "call_function")
    half = dataclasses.replace(mixed.quantization.half, floats=frozenset({softmax}))
    mixed.quantization = dataclasses.replace(mixed.quantization, half=half)
    found = OpenVINO().export(mixed, tmp_path / "net.xml").notes
    assert "1 operators planned for float32 run in bfloat16: the file has one float type." in found
    mixed, _ = CastFP16(mixed=True).apply(quantized)
    found = OpenVINO().export(mixed, tmp_path / "half.xml").notes
    assert any("float16 has no kernels" in note for note in found) and "bf16" not in found[0]


def test_a_cpu_without_bfloat16_computes_in_float32_and_that_is_said() -> None:
    def core(*able: str) -> SimpleNamespace:
        return SimpleNamespace(get_property=lambda device, name: list(able))

    assert usable_precision(core("FP32", "INT8"), "bf16") == "f32"
    assert usable_precision(core("FP32", "BF16"), "bf16") == "bf16"
    assert usable_precision(core(), "f32") == "f32"
    said = notes([], "bf16", "f32")
    assert "This CPU has no bf16 instructions" in said[1] and "HINT=f32" in said[2]
    assert len(notes([], "bf16", "bf16")) == 2


@installed
def test_for_throughput_every_calling_thread_has_its_own_request(tmp_path: Path) -> None:
    quantized = references.int8("resnet")
    artifact = OpenVINO(hint="throughput").export(quantized, tmp_path / "net.xml")
    runner = artifact.load(threads=2)
    assert isinstance(runner, OpenVINORunner)
    assert str(runner.compiled.get_property("PERFORMANCE_HINT")).endswith("THROUGHPUT")
    batches = [REFERENCES["resnet"].inputs(2, seed=seed).numpy() for seed in range(8)]
    alone = [runner.run([batch])[0].copy() for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda batch: runner.run([batch])[0].copy(), batches))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


@installed
def test_what_was_compiled_is_kept_where_the_user_asks(tmp_path: Path) -> None:
    quantized = references.int8("resnet")
    folder = tmp_path / "cache"
    artifact = OpenVINO(cache=str(folder)).export(quantized, tmp_path / "net.xml")
    assert artifact.settings == {"hint": "latency", "cache": str(folder)}
    assert OpenVINO(cache=str(folder)).open(artifact.path).settings == artifact.settings
    x = REFERENCES["resnet"].inputs(2, seed=9)
    first = artifact.load(threads=1)(x)
    assert list(folder.iterdir())
    assert torch.equal(artifact.load(threads=1)(x), first)


def test_an_unknown_hint_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no hint 'latancy'") as caught:
        OpenVINO(hint="latancy")  # type: ignore[arg-type]
    assert "latency" in (caught.value.hint or "")
