"""What is asked of an ONNX file before anything else sees it: each hostile one is refused at once, honest ones open."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from optimize import regular
from optimize.errors import Refused
from optimize.measure.openers import Opening, open_side
from optimize.measure.worker import Worker, write_arrays
from optimize.targets.onnx.reading import files_of, read_checked
from optimize.targets.onnx.runner import OnnxRunner
from optimize.targets.onnx.values import notes_of
from tests.targets.onnx_files import FLOAT, INT64, OPSETS, Y, added, constant, outside, refused, saved

BAD_PLACES = {
    "up": ({"location": "../w.bin"}, "not in the folder"),
    "up inside": ({"location": "a/../../w.bin"}, "not in the folder"),
    "absolute": ({"location": "/etc/passwd"}, "not in the folder"),
    "kernel log": ({"location": "/proc/kmsg"}, "not in the folder"),
    "of Windows": ({"location": "C:\\w.bin"}, "not in the folder"),
    "up on Windows": ({"location": "a\\..\\..\\w.bin"}, "not in the folder"),
    "nowhere": ({"location": ""}, "not in the folder"),
    "not said": ({}, "not in the folder"),
    "memory": ({"location": "*/_ORT_MEM_ADDR_/*", "offset": "4096"}, "not in the folder"),
    "missing": ({"location": "none.bin"}, "There is no file"),
    "folder": ({"location": "."}, "is a directory"),
    "fifo": ({"location": "fifo"}, "is a fifo"),
    "link out": ({"location": "link"}, "a link out of the folder"),
    "link to a device": ({"location": "zero"}, "is a device"),
    "NUL": ({"location": "w.bin\0"}, "NUL"),
    "negative offset": ({"location": "w.bin", "offset": "-4"}, "is no offset"),
    "digits": ({"location": "w.bin", "offset": "9" * 5000}, "is no offset"),
    "fraction": ({"location": "w.bin", "length": "8.0"}, "is no length"),
    "negative length": ({"location": "w.bin", "length": "-1"}, "is no length"),
    "other digits": ({"location": "w.bin", "offset": "٣"}, "is no offset"),
    "behind the end": ({"location": "w.bin", "offset": "12"}, "ends at byte 20"),
    "too long": ({"location": "w.bin", "length": "16"}, "needs 8"),
    "twice": ({"location": "w.bin", "location_": "/etc/passwd"}, "says twice"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with weights, a fifo, and links out of it."""
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    for place in (inner, inner / "sub", tmp_path):
        (place / "w.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    os.mkfifo(inner / "fifo")
    (inner / "link").symlink_to(tmp_path / "w.bin")
    (inner / "zero").symlink_to("/dev/zero")
    return inner


@pytest.mark.parametrize(("entries", "message"), BAD_PLACES.values(), ids=BAD_PLACES)
def test_data_that_is_not_the_files_own(entries: dict[str, str], message: str, folder: Path) -> None:
    refused(added(outside(**entries), folder / "m.onnx"), message, trust=True)


@pytest.mark.parametrize("location", ["w.bin", "sub/w.bin", "./w.bin"])
def test_data_beside_the_file_is_part_of_it(location: str, folder: Path) -> None:
    path = added(outside(location=location, offset="8", length="8", checksum="x"), folder / "m.onnx")
    assert files_of(path)[1] == (path, folder / location)
    side = open_side(str(path))
    assert side.run([np.zeros(2, np.float32)])[0].tolist() == [2, 3]


def test_a_download_cache_of_links_is_one_folder(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "b").write_bytes(bytes(8))
    added(outside(location="w.bin"), tmp_path / "blobs" / "a")
    for name, blob in {"m.onnx": "a", "w.bin": "b"}.items():
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / blob)
    assert len(files_of(tmp_path / "snapshot" / "m.onnx")[1]) == 2


@given(location=st.text() | st.lists(st.sampled_from(["..", ".", "a", "/", "\\", "w.bin", "C:", "~"])).map("/".join))
def test_no_location_leads_out_of_the_folder(location: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.getbasetemp() / "outer" / "a"
    place.mkdir(parents=True, exist_ok=True)
    for file in (place / "w.bin", place.parent / "w.bin"):
        file.write_bytes(bytes(8))
    tensor = outside()
    try:
        tensor.external_data.add(key="location", value=location)
    except ValueError:  # what UTF-8 cannot hold, protobuf does not take
        return
    path = added(tensor, place / "m.onnx")
    try:
        _, files = files_of(path)
    except Refused:
        return
    assert all(file.resolve().is_relative_to(place.resolve()) for file in files)


def in_attribute(tensor: TensorProto) -> Sequence[onnx.NodeProto]:
    return [helper.make_node("Constant", [], ["c"], value=tensor), helper.make_node("Add", ["x", "c"], ["y"])]


def in_branch(tensor: TensorProto) -> Sequence[onnx.NodeProto]:
    branch = helper.make_graph(list(in_attribute(tensor)), "b", [], [Y])
    return [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]


def in_list(tensor: TensorProto) -> Sequence[onnx.NodeProto]:
    return [helper.make_node("Odd", ["x"], ["y"], domain="odd", ts=[tensor])]


def in_sparse(tensor: TensorProto) -> Sequence[onnx.NodeProto]:
    sparse = helper.make_sparse_tensor(tensor, constant("i", [0]), [2])
    return [helper.make_node("Constant", [], ["c"], sparse_value=sparse), helper.make_node("Add", ["x", "c"], ["y"])]


@pytest.mark.parametrize("place", [in_attribute, in_branch, in_list, in_sparse])
def test_tensors_at_every_depth_are_checked(place: Callable[[TensorProto], Any], tmp_path: Path) -> None:
    refused(saved(tmp_path / "m.onnx", place(outside(location="/etc/passwd"))), "not in the folder")


def test_tensors_of_functions_are_checked(tmp_path: Path) -> None:
    nodes = list(in_attribute(outside(location="../x")))
    function = helper.make_function("local", "f", ["x"], ["y"], nodes, OPSETS[:1])
    path = saved(tmp_path / "m.onnx", [helper.make_node("f", ["x"], ["y"], domain="local")], [], [function])
    refused(path, "not in the folder")


BAD_TENSORS = {
    "dims": (TensorProto(name="w", dims=[2**60], data_type=FLOAT, raw_data=bytes(8)), "needs"),
    "overflow": (TensorProto(name="w", dims=[2**32, 2**32], data_type=FLOAT, raw_data=bytes(8)), "needs"),
    "negative": (TensorProto(name="w", dims=[-2, -1], data_type=FLOAT, raw_data=bytes(8)), "is no shape"),
    "axes": (TensorProto(name="w", dims=[1] * 10_000, data_type=FLOAT, raw_data=bytes(4)), "is no shape"),
    "short": (TensorProto(name="w", dims=[2], data_type=FLOAT, float_data=[1]), "1 elements are stored"),
    "long": (TensorProto(name="w", dims=[2], data_type=FLOAT, float_data=[1, 2, 3]), "3 elements are stored"),
    "elsewhere": (TensorProto(name="w", dims=[2], data_type=FLOAT, int32_data=[1, 2]), "0 elements are stored"),
    "type": (TensorProto(name="w", dims=[2], data_type=99, raw_data=bytes(8)), "element type 99"),
    "no type": (TensorProto(name="w", dims=[2], raw_data=bytes(8)), "element type 0"),
    "raw text": (TensorProto(name="w", dims=[2], data_type=TensorProto.STRING, raw_data=bytes(8)), "text"),
    "claimed": (outside([2**40], location="w.bin"), "ends at byte"),
}


@pytest.mark.parametrize(("tensor", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_are_not_what_they_say(tensor: TensorProto, message: str, folder: Path) -> None:
    refused(added(tensor, folder / "m.onnx"), message, trust=True)


@pytest.mark.parametrize("dtype", [d for d in TensorProto.DataType.values() if d != TensorProto.UNDEFINED])
def test_every_element_type_is_known(dtype: int, tmp_path: Path) -> None:
    values = [b"a", b"b", b"c"] if dtype == TensorProto.STRING else [1, 0, 1]
    for raw in (False, True):
        if raw and dtype == TensorProto.STRING:
            continue
        array = np.array([1, 0, 1]).astype(helper.tensor_dtype_to_np_dtype(dtype)) if raw else None
        tensor = (
            numpy_helper.from_array(array, "w") if array is not None else helper.make_tensor("w", dtype, [3], values)
        )
        read_checked(added(tensor, tmp_path / "m.onnx"))


def test_files_that_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    for content in (b"", b"\xff" * 100, b"\x08\x09"):
        path.write_bytes(content)
        refused(path, "is not an ONNX file")
    path.unlink()
    os.mkfifo(path)
    refused(path, "is a fifo")
    refused(tmp_path, "is a directory")
    refused(Path("/dev/zero"), "is a device")
    refused(Path("/proc/kmsg"), "is not an ONNX file")
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**31)
    refused(path, "nearly all of them are holes")
    monkeypatch.setattr(regular, "_is_hollow", lambda found: False)
    refused(path, "at most")


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(content)
    try:
        read_checked(path)
    except Refused:
        return


def test_custom_operators_load_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("Odd", ["x"], ["y"], domain="com.example")])
    read_checked(path)
    with pytest.raises(Refused, match="ONNX Runtime cannot open"):
        open_side(str(path))


@pytest.mark.parametrize(
    ("given_", "operator"),
    [
        (helper.make_tensor_sequence_value_info("x", FLOAT, None), "SequenceLength"),
        (helper.make_tensor_value_info("x", FLOAT, [-1, 4]), "Size"),
        (helper.make_tensor_value_info("x", FLOAT, ["n", -4]), "Size"),
    ],
)
def test_an_input_that_is_no_tensor_or_has_a_negative_size(
    given_: onnx.ValueInfoProto, operator: str, tmp_path: Path
) -> None:
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"])],
        "g",
        [given_],
        [helper.make_tensor_value_info("y", INT64, [])],
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=OPSETS[:1], ir_version=9).SerializeToString())
    for open_ in (lambda: open_side(str(path)), lambda: Opening(tmp_path).open(str(path))):
        with pytest.raises(Refused, match="takes 'x"):
            open_()


def of_texts(path: Path, *texts: bytes) -> Path:
    """Writes a file that gives ``x`` and texts."""
    value = helper.make_tensor("s", TensorProto.STRING, [len(texts)], texts)
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Constant", [], ["s"], value=value)]
    model = onnx.load(saved(path, nodes))
    model.graph.output.append(helper.make_tensor_value_info("s", TensorProto.STRING, [len(texts)]))
    path.write_bytes(model.SerializeToString())
    return path


def test_texts_that_are_none_are_told(tmp_path: Path) -> None:
    path = of_texts(tmp_path / "m.onnx", b"\xff\x1b[2J")
    with pytest.raises(Refused, match=r"gives texts that are not UTF-8 \('s'\)"):
        open_side(str(path)).run([np.zeros(2, np.float32)])
    _, texts = open_side(str(of_texts(path, b"caf\xc3\xa9"))).run([np.zeros(2, np.float32)])
    assert texts.tolist() == ["caf\u00e9"]


def test_operators_that_draw_are_told_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    draw = helper.make_node("RandomUniform", [], ["u"], shape=[2])
    branch = helper.make_graph([draw], "inner", [], [helper.make_tensor_value_info("u", FLOAT, [2])])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    taken = helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
    graph = helper.make_graph([node], "g", [taken], [helper.make_tensor_value_info("y", FLOAT, [2])])
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, ir_version=8), path)
    (note,) = Opening(tmp_path).open(str(path)).artifact.notes
    assert "draws numbers, or keeps a state, by RandomUniform:" in note


@pytest.mark.parametrize("stored", ["input", "initializer", "Constant"])
@pytest.mark.parametrize("is_on", [True, False])
def test_dropping_in_training_draws(stored: str, is_on: bool, tmp_path: Path) -> None:
    said, ratio = numpy_helper.from_array(np.array(is_on), "on"), numpy_helper.from_array(np.float32(0.5), "ratio")
    taken = [helper.make_tensor_value_info("x", FLOAT, [2]), helper.make_tensor_value_info("on", TensorProto.BOOL, [])]
    made = [helper.make_node("Constant", [], ["on"], value=said)] if stored == "Constant" else []
    drop = helper.make_node("Dropout", ["x", "ratio", "on"], ["y"])
    held = [ratio, said] if stored == "initializer" else [ratio]
    given = taken if stored == "input" else taken[:1]
    graph = helper.make_graph([*made, drop], "g", given, [helper.make_tensor_value_info("y", FLOAT, [2])], held)
    notes = notes_of(helper.make_model(graph, opset_imports=OPSETS))
    assert [note.split(":")[0] for note in notes] == [
        "It draws numbers, or keeps a state, by Dropout" for _ in range(stored == "input" or is_on)
    ]


def test_texts_are_not_compared(tmp_path: Path) -> None:
    artifact = Opening(tmp_path).open(str(of_texts(tmp_path / "m.onnx", b"a"))).artifact
    worker = Worker()
    worker.runners = [OnnxRunner(artifact)]
    write_arrays(tmp_path / "x.npz", [np.zeros(2, np.float32)])
    answer = worker.answer({"do": "run", "inputs": str(tmp_path / "x.npz"), "outputs": str(tmp_path / "y.npz")})
    assert not answer["ok"] and "Output 2 of 2 holds texts" in answer["error"]
    worker._loaded = lambda: SimpleNamespace(artifact=artifact, answer=lambda _: [[np.zeros(2)]])  # type: ignore[assignment,return-value]
    answer = worker.answer({"do": "run", "inputs": str(tmp_path / "x.npz"), "outputs": str(tmp_path / "y.npz")})
    assert not answer["ok"] and "Output 1 of 1 is no tensor" in answer["error"]
