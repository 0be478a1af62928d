"""What is asked of an ONNX file before anything else sees it: each hostile one is refused at once, honest ones open."""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from optimize.bench.subjects import Opening
from optimize.errors import Refused
from optimize.measure.sides import open_side
from optimize.targets.onnx.reading import files_of, read_checked
from optimize.targets.onnx.values import read_values

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
X, Y = (helper.make_tensor_value_info(name, FLOAT, [2]) for name in "xy")
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]


def saved(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> Path:
    """Writes a model of these nodes, unchecked."""
    graph = helper.make_graph(nodes, "g", [X], [Y], list(constants))
    model = helper.make_model(graph, opset_imports=OPSETS, functions=list(functions), ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def outside(shape: Sequence[int] = (2,), dtype: int = FLOAT, **entries: str) -> TensorProto:
    """Returns a tensor whose data lies outside the file."""
    tensor = TensorProto(name="w", dims=shape, data_type=dtype, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key.rstrip("_"), value=value)
    return tensor


def added(tensor: TensorProto, path: Path) -> Path:
    """Writes ``y = x + w``."""
    return saved(path, [helper.make_node("Add", ["x", "w"], ["y"])], [tensor])


def constant(name: str, values: Any, dtype: Any = np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def refused(path: Path, message: str, *, trust: bool = False) -> None:
    """Checks that a file is refused, soon."""
    start = time.monotonic()
    with pytest.raises(Refused, match=message) as caught:
        read_checked(path, trust=trust)
    assert time.monotonic() - start < 20 and len(str(caught.value)) < 1500


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


def test_files_that_are_no_models(tmp_path: Path) -> None:
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
    refused(path, "at most")


def wrapped(number: int, content: bytes) -> bytes:
    """Returns a field of protobuf that holds a message."""
    size, digits = len(content), []
    while size > 127:
        digits.append(size % 128 + 128)
        size //= 128
    return bytes([number << 3 | 2, *digits, size]) + content


def test_graphs_inside_graphs_are_bounded_by_protobuf(tmp_path: Path) -> None:
    graph = b""
    for _ in range(3000):  # a node of the graph, its attribute, the graph in that
        graph = wrapped(1, wrapped(5, wrapped(6, graph)))
    (tmp_path / "m.onnx").write_bytes(wrapped(7, graph))
    refused(tmp_path / "m.onnx", "is not an ONNX file")


def calls(depth: int, width: int) -> list[onnx.FunctionProto]:
    """Returns functions of which each calls the next so many times."""
    found = [helper.make_function("local", "f0", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], OPSETS[:1])]
    for level in range(1, depth):
        names = ["x", *(f"v{i}" for i in range(width - 1)), "y"]
        pairs = itertools.pairwise(names)
        nodes = [helper.make_node(f"f{level - 1}", [one], [other], domain="local") for one, other in pairs]
        found.append(helper.make_function("local", f"f{level}", ["x"], ["y"], nodes, OPSETS))
    return found


@pytest.mark.parametrize(
    ("depth", "width", "message"), [(31, 2, "more than 1000000 nodes"), (65, 1, "64 deep"), (5000, 1, "64 deep")]
)
def test_functions_that_grow_without_end(depth: int, width: int, message: str, tmp_path: Path) -> None:
    top = [helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="local")]
    path = saved(tmp_path / "m.onnx", top, [], calls(depth, width))
    refused(path, message, trust=True)
    for open_ in (lambda: open_side(str(path)), lambda: Opening(tmp_path).open(str(path)), lambda: read_values(path)):
        with pytest.raises(Refused, match=message):
            open_()


def test_functions_that_call_themselves_or_hide_operators(tmp_path: Path) -> None:
    def function(domain: str, name: str, node: str) -> onnx.FunctionProto:
        inner = helper.make_node(node, ["x"], ["y"], domain="local" if node in "fg" else "")
        return helper.make_function(domain, name, ["x"], ["y"], [inner], OPSETS)

    top = [helper.make_node("f", ["x"], ["y"], domain="local")]
    pair = [function("local", "f", "g"), function("local", "g", "f")]
    refused(saved(tmp_path / "m.onnx", top, [], pair), "calls itself")
    twice = [function("local", "f", "Relu"), function("local", "f", "Neg")]
    refused(saved(tmp_path / "m.onnx", top, [], twice), "two functions of one name")
    hiding = [function("", "Loop", "Relu")]
    refused(saved(tmp_path / "m.onnx", top, [], hiding), "by the name of an operator")


def test_honest_functions_open(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("f9", ["x"], ["y"], domain="local")], [], calls(10, 2))
    assert open_side(str(path)).run([np.array([-1, 2], np.float32)])[0].tolist() == [0, 2]


def body(*inner: onnx.NodeProto, ends: str | None = None) -> onnx.GraphProto:
    """Returns the body of a loop over one float value; ``ends`` names the value that says whether it goes on."""
    infos = [helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", INT64), ("c", TensorProto.BOOL))]
    carried, made = (helper.make_tensor_value_info(name, FLOAT, [2]) for name in ("v", "w"))
    keep = helper.make_node("Identity", ["c"], ["d"]) if ends is None else helper.make_node("Identity", [ends], ["d"])
    goes_on = helper.make_tensor_value_info("d", TensorProto.BOOL, [])
    nodes = [*inner, keep, helper.make_node("Add", ["v", "v"], ["w"])]
    return helper.make_graph(nodes, "body", [*infos, carried], [goes_on, made])


def loop(trips: str = "m", inside: onnx.GraphProto | None = None) -> onnx.NodeProto:
    return helper.make_node("Loop", [trips, "t", "x"], ["y"], name="round", body=inside or body())


TRUE = constant("t", True, bool)
NESTED = helper.make_node("Loop", ["m", "", "v"], ["u"], body=body())
BIG_LOOPS = {
    "trips": ([loop()], [constant("m", 2**62)], "may run 4611686018427387904 rounds"),
    "nested": ([loop(inside=body(NESTED))], [constant("m", 100_000)], "nodes are executed"),
    "endless": ([loop("")], [], "no largest number of rounds"),
    "product": (
        [helper.make_node("Mul", ["a", "a"], ["m"]), loop()],
        [constant("a", 2**20)],
        "may run 1099511627776 rounds",
    ),
    "hidden": (
        [helper.make_node("NonZero", ["a"], ["b"]), helper.make_node("ReduceL1", ["b"], ["m"], keepdims=0), loop()],
        [constant("a", [1, 1])],
        "is hidden",
    ),
}


@pytest.mark.parametrize(("nodes", "constants", "message"), BIG_LOOPS.values(), ids=BIG_LOOPS)
def test_loops_that_do_not_end(nodes: Any, constants: Any, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", nodes, [TRUE, *constants])
    refused(path, message)
    read_checked(path, trust=True)


def test_a_loop_in_a_function_is_followed_to_its_constants(tmp_path: Path) -> None:
    function = helper.make_function("local", "f", ["x", "m", "t"], ["y"], [loop()], OPSETS[:1])
    top = [helper.make_node("f", ["x", "n", "t"], ["y"], domain="local")]
    refused(saved(tmp_path / "m.onnx", top, [TRUE, constant("n", 2**40)], [function]), "may run")
    read_checked(saved(tmp_path / "m.onnx", top, [TRUE, constant("n", 12)], [function]))


def test_loops_of_honest_files_open(tmp_path: Path) -> None:
    size = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("ReduceProd", ["s"], ["m"], keepdims=0)]
    assert open_side(str(saved(tmp_path / "a.onnx", [*size, loop()], [TRUE]))).run([np.ones(2, np.float32)])[0][0] == 4
    nonzero = [helper.make_node("NonZero", ["x"], ["n"]), helper.make_node("Size", ["n"], ["m"]), loop()]
    read_checked(saved(tmp_path / "b.onnx", nonzero, [TRUE]))
    read_checked(saved(tmp_path / "c.onnx", [loop()], [TRUE, constant("m", 1000)]))


def node(op: str, inputs: str, output: str = "b", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attributes)


HUGE, TABLE = constant("n", [2**16, 2**16]), constant("a", np.ones((2**15, 1)), np.float32)
GROWN = {
    "ConstantOfShape": ([node("ConstantOfShape", "n")], [HUGE]),
    "Expand": ([node("Expand", "a n")], [constant("a", [1.0], np.float32), HUGE]),
    "Tile": ([node("Tile", "a n")], [constant("a", [[1.0]], np.float32), HUGE]),
    "Range": ([node("Range", "a b c", "d")], [constant("a", 0), constant("b", 2**40), constant("c", 1)]),
    "OneHot": (
        [node("OneHot", "i n v")],
        [constant("i", [0, 1]), constant("n", 2**40), constant("v", [0, 1], np.float32)],
    ),
    "Pad": ([node("Pad", "a n")], [constant("a", [1.0], np.float32), constant("n", [0, 2**40])]),
    "Resize": ([node("Resize", "a  s".replace("  ", " x "))], [TABLE, constant("s", [2**20, 2**20], np.float32)]),
    "outer product": ([node("Transpose", "a", "b"), node("MatMul", "a b", "d")], [TABLE]),
    "outer sum": ([node("Transpose", "a", "b"), node("Add", "a b", "d")], [TABLE]),
    "doubled": (
        [node("Concat", f"v{i} v{i}", f"v{i + 1}", axis=0) for i in range(40)],
        [constant("v0", [1.0], np.float32)],
    ),
    "computed size": ([node("Mul", "n n", "m"), node("ConstantOfShape", "m")], [constant("n", [2**20])]),
    "of the input": ([node("Expand", "x n")], [constant("n", [2**40, 2])]),
    "random": ([helper.make_node("RandomNormal", [], ["b"], shape=[2**20, 2**20])], []),
}


@pytest.mark.parametrize(("nodes", "constants"), GROWN.values(), ids=GROWN)
def test_constants_that_grow_to_gigabytes(nodes: Any, constants: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [*nodes, helper.make_node("Relu", ["x"], ["y"])], constants)
    refused(path, "asks for too much: a node")
    read_checked(path, trust=True)


def test_a_sparse_constant_counts_whole(tmp_path: Path) -> None:
    sparse = helper.make_sparse_tensor(constant("v", [1.0], np.float32), constant("i", [0]), [2**40])
    path = saved(tmp_path / "m.onnx", [helper.make_node("Constant", [], ["c"], sparse_value=sparse)])
    refused(path, "asks for too much")


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(content)
    try:
        read_checked(path)
    except Refused:
        return


@given(st.data())
def test_a_model_with_a_byte_changed_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.onnx"
    content = bytearray(saved(path, [*GROWN["outer sum"][0], loop()], [TRUE]).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        read_checked(path)
    except Refused:
        return


def test_custom_operators_load_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("Odd", ["x"], ["y"], domain="com.example")])
    read_checked(path)
    with pytest.raises(Refused, match="ONNX Runtime cannot open"):
        open_side(str(path))


def test_an_input_that_is_no_tensor(tmp_path: Path) -> None:
    given_ = helper.make_tensor_sequence_value_info("x", FLOAT, None)
    graph = helper.make_graph(
        [helper.make_node("SequenceLength", ["x"], ["y"])],
        "g",
        [given_],
        [helper.make_tensor_value_info("y", INT64, [])],
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=OPSETS[:1], ir_version=9).SerializeToString())
    for open_ in (lambda: open_side(str(path)), lambda: Opening(tmp_path).open(str(path))):
        with pytest.raises(Refused, match="takes 'x'"):
            open_()
