"""How much an ONNX file may ask for: functions, loops and constants that grow are refused before anything runs."""

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from optimize.errors import Refused
from optimize.measure.openers import Opening, open_side
from optimize.targets.onnx.reading import read_checked
from optimize.targets.onnx.values import read_values
from tests.targets.onnx_files import FLOAT, INT64, OPSETS, constant, refused, saved


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


@pytest.mark.parametrize(("part", "times"), [(wrapped(5, b""), 1_000_001), (b"\x40\x01", 10_000_001)])
def test_a_file_of_empty_parts_is_refused_before_it_is_parsed(part: bytes, times: int, tmp_path: Path) -> None:
    """A parser makes an object of two bytes: ten megabytes took two gigabytes."""
    whole = saved(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], []).read_bytes()
    (tmp_path / "m.onnx").write_bytes(whole + wrapped(7, part * times) + b"\0" * 9)
    refused(tmp_path / "m.onnx", "more than a million parts")


def test_numbers_that_stand_one_by_one_are_bounded(tmp_path: Path) -> None:
    """A byte of the file is a number of eight bytes in memory, and of more while it is read."""
    whole = saved(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], []).read_bytes()
    tensor = wrapped(5, wrapped(7, b"\1" * 64_000_001))  # int64_data of an initializer
    (tmp_path / "m.onnx").write_bytes(whole + wrapped(7, tensor))
    refused(tmp_path / "m.onnx", "whole numbers one by one")


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
    ("depth", "width", "message"),
    [(18, 2, "more than 10.... nodes"), (31, 2, "more than 10.... nodes"), (65, 1, "64 deep"), (5000, 1, "64 deep")],
)
def test_functions_that_grow_without_end(depth: int, width: int, message: str, tmp_path: Path) -> None:
    top = [helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="local")]
    path = saved(tmp_path / "m.onnx", top, [], calls(depth, width))
    refused(path, message, trust=True)
    for open_ in (lambda: open_side(str(path)), lambda: Opening(tmp_path).open(str(path)), lambda: read_values(path)):
        with pytest.raises(Refused, match=message):
            open_()


def test_a_long_node_that_is_called_often_is_refused_before_it_is_written_out(tmp_path: Path) -> None:
    """Each of its 4,096 copies is read: a million numbers for a node took an hour."""
    functions = calls(12, 2)
    functions[0].node.append(helper.make_node("Squeeze", ["x"], ["z"], axes=[0] * 100_000))
    top = [helper.make_node("f11", ["x"], ["y"], domain="local")]
    refused(saved(tmp_path / "m.onnx", top, [], functions), r"or \d+ bytes when its functions are written out")


def test_functions_that_are_called_as_often_as_layers_of_a_network_are_read(tmp_path: Path) -> None:
    names = ["x", *(f"v{i}" for i in range(9_999)), "y"]
    top = [helper.make_node("f3", [one], [other], domain="local") for one, other in itertools.pairwise(names)]
    read_checked(saved(tmp_path / "m.onnx", top, [], calls(4, 2)))


def test_a_shape_of_a_million_dimensions_is_none(tmp_path: Path) -> None:
    """The product of its sizes takes minutes, and no signal ends it."""
    path = saved(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], [])
    model = onnx.load(path)
    model.graph.value_info.append(helper.make_tensor_value_info("y", FLOAT, [2**62] * 10**5))
    onnx.save(model, path)
    refused(path, "100000 dimensions is no shape")
    turned = helper.make_node("Transpose", ["x"], ["y"], perm=[1] * 300_000)
    read_checked(saved(tmp_path / "m.onnx", [turned, helper.make_node("Relu", ["y"], ["z"])], []))


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


@pytest.mark.parametrize(
    ("op", "inputs", "domain", "message"),
    [
        ("DequantizeLinear", [], "", "with 0 inputs; ONNX wants 2 to 3"),
        ("DequantizeLinear", ["x"], "com.microsoft", "with 1 inputs; ONNX wants 2 to 3"),
        ("Relu", ["x", "x"], "", "with 2 inputs; ONNX wants 1 to 1"),
    ],
)
def test_nodes_without_the_inputs_of_their_operator(
    op: str, inputs: list[str], domain: str, message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node(op, inputs, ["y"], domain=domain)], [])
    refused(path, message, trust=True)
    for open_ in (lambda: open_side(str(path)), lambda: Opening(tmp_path).open(str(path)), lambda: read_values(path)):
        with pytest.raises(Refused, match=message):
            open_()


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


@pytest.mark.parametrize("operator", ["MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMul", "Gemm"])
@pytest.mark.parametrize("sizes", ["stored", "computed"])
def test_products_sum_over_something(operator: str, sizes: str, tmp_path: Path) -> None:
    """With nothing to sum over their answer is what the run before has left: a file kept its answers there."""
    domain = "com.microsoft" * operator.startswith("Dynamic")
    zero, some = constant("zero", [0]), constant("some", np.zeros((4, 2)), np.uint8)
    cut = [node("Slice", "some zero zero", "none")]
    held = [constant("none", np.zeros((0, 2)), np.uint8)] if sizes == "stored" else [zero, some]
    made = helper.make_node(operator, ["x", "none", *["scale"] * bool(domain)], ["p"], domain=domain)
    nodes = [*cut * (sizes == "computed"), made, helper.make_node("Relu", ["x"], ["y"])]
    path = saved(tmp_path / "m.onnx", nodes, held)
    refused(path, "multiplies nothing in 'p': its answer is what lay in memory")
    for named in (made.input, nodes[0].input):  # the same product of some weights
        named[:] = ["some" if name == "none" else name for name in named]
    read_checked(saved(path, nodes, [zero, some]))


SIDES = {"a": (1024, 1, 1), "b": (1, 1024, 1), "c": (1, 1, 64), "d": (1, 1, 0)}


@pytest.mark.parametrize("operator", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("names", ["abcd", "a" * 20_000], ids=["steps that grow", "many inputs"])
def test_no_step_to_a_small_constant_is_large(operator: str, names: str, tmp_path: Path) -> None:
    """All of them together are empty, or small; the sums on the way had gigabytes, and so had a stack of all."""
    held = [constant(name, np.zeros(shape), np.float64) for name, shape in SIDES.items() if name in names]
    nodes = [helper.make_node(operator, list(names), ["s"]), helper.make_node("Relu", ["x"], ["y"])]
    path = saved(tmp_path / "m.onnx", nodes, held)
    read_checked(path)  # what is imported on the way is not counted
    tracemalloc.start()
    try:
        read_checked(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_numbers_as_text_are_not_calculated_with(tmp_path: Path) -> None:
    text, power = TensorProto.STRING, 10**9  # as Python's own integers it would have 400 MB
    nodes = [node("Cast", "a", "s", to=text), node("Cast", "n", "t", to=text), node("Pow", "s t", "p")]
    nodes += [node("Mul", "p p", "q"), helper.make_node("Relu", ["x"], ["y"])]
    read_checked(saved(tmp_path / "m.onnx", nodes, [constant("a", [10]), constant("n", [power])]))


def test_a_sparse_constant_counts_whole(tmp_path: Path) -> None:
    sparse = helper.make_sparse_tensor(constant("v", [1.0], np.float32), constant("i", [0]), [2**40])
    path = saved(tmp_path / "m.onnx", [helper.make_node("Constant", [], ["c"], sparse_value=sparse)])
    refused(path, "asks for too much")


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
