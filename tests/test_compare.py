"""``optimize compare`` as a user types it."""

import json
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest

from optimize.errors import Refused
from optimize.gate.case import Opening, check
from optimize.gate.limits import Case, Settings
from optimize.gate.verdict import Verdict
from optimize.progress import silent
from optimize.report import layers
from optimize.sandbox import Answer
from tests.measure.comparisons import edited, scaled, write_pair
from tests.test_cli import Typed


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A network in float, in INT8, and in INT8 with one scale four times too large."""
    folder = tmp_path_factory.mktemp("compare")
    first, second = write_pair("resnet", folder)
    return first, second, edited(second, folder / "spoilt.onnx", scaled("blocks.1.first.conv.weight_scale", 4))


def test_a_spoilt_layer_is_named_drawn_and_ends_in_1(
    files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed
) -> None:
    first, good, spoilt = files
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((32, 3, 32, 32), np.float32))
    data = ("--data", tmp_path / "x.npy")
    done = typed("compare", first, spoilt, "--layers", "--threshold", 20, *data, "--out", tmp_path / "c.json")
    assert done.returncode == 1, done.stderr
    assert "First to go wrong: blocks.1.first.conv (Conv, value conv2d_3)" in done.stdout
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["first_wrong"] == "conv2d_3" and content["found"]["layer_samples"] == 32
    done = typed("compare", first, spoilt, "--layers", "--worst-first", *data, "--out", tmp_path / "c.html")
    assert done.returncode == 0 and str(tmp_path / "c.html") in done.stdout, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("blocks.1.first.conv") and "wrong" in line]
    assert len(rows) == 1 and "blocks.1.first.conv: " in (tmp_path / "c.html").read_text()
    done = typed("compare", first, good, "--layers", "--threshold", 25, *data, "--out", tmp_path / "c.svg")
    assert done.returncode == 0 and "Nothing goes wrong" in done.stdout, done.stderr
    assert (tmp_path / "c.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_outputs_go_by_their_names(suffix: str, tmp_path: Path, typed: Typed) -> None:
    """Who asks a runtime for 'scores' gets them by name, wherever they stand."""
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 16])
    ends = {
        name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 16])
        for name in ("scores", "boxes")
    }
    made = {}
    for name, order, operators in (
        ("first", ("scores", "boxes"), ("Sin", "Exp")),
        ("turned", ("boxes", "scores"), ("Sin", "Exp")),
        ("exchanged", ("boxes", "scores"), ("Exp", "Sin")),  # the same as the first by place
    ):
        nodes = [onnx.helper.make_node(kind, ["x"], [end]) for kind, end in zip(operators, ends, strict=True)]
        graph = onnx.helper.make_graph(nodes, "g", [given], [ends[end] for end in order])
        file = tmp_path / f"{name}.onnx"
        onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), file)
        if suffix == ".xml":
            openvino.save_model(openvino.convert_model(file), file.with_suffix(suffix), compress_to_fp16=False)
        made[name] = file.with_suffix(suffix)
    for other, code in (("turned", 0), ("exchanged", 1)):
        done = typed("compare", made["first"], made[other], "--min-sqnr", 30)
        assert done.returncode == code, done.stdout + done.stderr
    case = Case(base=str(made["first"]), candidate=str(made["exchanged"]), max_seconds=5.0)
    assert check(case, Settings(cases=(case,)), Opening(tmp_path)).verdict is Verdict.FAIL


def test_noise_judges_no_file_that_rounds(files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed) -> None:
    """Figures are figures there: nothing is wrong, nothing agrees, and no threshold is held against them."""
    first, _, spoilt = files
    done = typed("compare", first, spoilt, "--layers", "--out", tmp_path / "c.json")
    assert done.returncode == 0 and "Not judged" in done.stdout, done.stderr
    assert not {"wrong", "follows", "Nothing goes wrong"} & set(done.stdout.split())
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["first_wrong"] is None and found["found"]["judged"] is False
    assert {tensor["state"] for tensor in found["found"]["tensors"]} == {"not judged"}
    done = typed("compare", first, spoilt, "--threshold", 20)
    assert done.returncode == 2 and "--data" in done.stderr
    done = typed("compare", first, first, "--threshold", 100)
    assert done.returncode == 0 and "Not judged" not in done.stdout, done.stderr


def test_outputs_on_data(files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((5, 3, 32, 32), np.float32))
    done = typed("compare", *files[:2], "--data", tmp_path / "x.npy", "--threshold", 25)
    assert done.returncode == 0, done.stderr
    assert (
        "5 samples of" in done.stdout
        and "largest" in done.stdout
        and "Top-1" not in done.stdout
        and "Layer" not in done.stdout
    )


def test_bad_words_end_in_one_paragraph(files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed) -> None:
    first, second, _ = files
    report = tmp_path / "report.json"
    report.write_text("{}")
    bad = [
        ((first, second, "--out", tmp_path / "c.pdf"), 2, "no .html, .svg or .json"),
        ((first, second, "--out", tmp_path / "c.svg"), 2, "--layers"),
        ((first, second, "--input-shape", "3,x"), 2, "is not a shape"),
        ((first, second, "--data", tmp_path / "none.npz"), 1, "none.npz"),
        ((first, tmp_path / "none.onnx"), 1, "none.onnx"),
        ((report, report), 2, "is not a report of this version"),
        ((report, second), 2, "the other one is not"),
        ((first,), 2, "SECOND"),
    ]
    for words, code, message in bad:
        done = typed("compare", *words)
        assert done.returncode == code and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 6


def test_what_was_asked_is_not_told_by_the_process_that_runs_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that takes it over says figures; which files, against which threshold and when is known without it."""
    distance = {"sqnr_db": 20.0, "signal_power": 1.0, "noise_power": 0.01, "max_abs_error": 0.1, "not_finite": 0}
    output = {"name": "y", "distance": {**distance, "first_range": None, "second_range": None}}
    found = {"outputs": [output], "top1": None, "samples": 1, "threshold_db": 5.0}
    told = {
        "sides": [{"kind": "ONNX", "sha256": None}] * 2, "data": "noise", "synthetic": True, "found": found,
        "command": "forged", "created": "yesterday", "files": ["forged"], "first_wrong": "forged",
    }  # fmt: skip
    monkeypatch.setattr(layers.sandbox, "call", lambda *_, **__: Answer(told, ()))
    asked = {"trust": False, "threshold_db": 30.0, "command": "optimize compare a b"}
    record = layers.compare_files("a", "b", silent, **asked)
    assert (record.command, record.files, record.first.path, record.second.path) == (
        asked["command"],
        ("a", "b"),
        "a",
        "b",
    )
    assert record.found.is_below and record.first_wrong is None and record.created != "yesterday"
    for wrong in ({"sides": []}, {"sides": [{"path": "c", "kind": "ONNX"}] * 2}, {"found": None}, {"data": 1}):
        monkeypatch.setattr(layers.sandbox, "call", lambda *_, wrong=wrong, **__: Answer({**told, **wrong}, ()))
        with pytest.raises(Refused, match="gave no comparison"):
            layers.compare_files("a", "b", silent, **asked)


def test_an_axis_ends_above_values_that_are_all_equal() -> None:
    assert layers._ends([150.0, 200.0])[1] > 40.0
