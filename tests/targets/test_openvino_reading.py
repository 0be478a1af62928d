"""What is asked of an OpenVINO file before OpenVINO sees it: hostile ones are refused at once, honest ones open."""

import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimize import sandbox
from optimize.errors import Refused
from optimize.measure.fleet import Fleet
from optimize.measure.openers import Opening
from optimize.profile.artifacts import profile_file
from optimize.registry import find_target
from optimize.targets.openvino import description
from optimize.targets.openvino.description import Body
from optimize.targets.openvino.reading import check_ir, ends_of, read_model

ov = pytest.importorskip("openvino")


def saved(path: Path, trips: int = 5, size: int = 4, computed: bool = False) -> Path:
    """Writes a loop over ``x [1, 4]`` of so many rounds, its result broadcast to ``[size, 4]``."""
    op = ov.opset13
    x, carried = (op.parameter([1, 4], np.float32) for _ in range(2))
    x.output(0).get_tensor().set_names({"x"})
    more, true = op.add(carried, op.constant(np.float32(1))), op.constant(np.array([True]))
    rounds = (
        op.add(op.constant(np.int64(trips)), op.constant(np.int64(0))) if computed else op.constant(np.int64(trips))
    )
    loop = op.loop(rounds, op.constant(np.array([True])))
    loop.set_function(ov.Model([more, true], [carried], "body"))
    loop.set_special_body_ports([-1, 1])
    loop.set_merged_input(carried, x.output(0), more.output(0))
    target = op.constant(np.array([size, 4], np.int64))
    model = ov.Model([op.broadcast(loop.get_iter_value(more.output(0), -1), target)], [x], "net")
    ov.save_model(model, path, compress_to_fp16=False)
    return path


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("ir") / "m.xml")


def spoilt(honest: Path, folder: Path, edit: Callable[[str], str]) -> Path:
    """Writes a changed copy of a description, and the weights beside it."""
    path = folder / "m.xml"
    path.write_text(edit(honest.read_text()))
    path.with_suffix(".bin").write_bytes(honest.with_suffix(".bin").read_bytes())
    return path


def refused(path: Path, message: str, *, trust: bool = False) -> None:
    start = time.monotonic()
    with pytest.raises(Refused, match=message) as caught:
        check_ir(path, trust=trust)
    assert time.monotonic() - start < 20 and len(str(caught.value)) < 1500


def const(key: str, value: str) -> Callable[[str], str]:
    """Returns an edit of an attribute of the last constant, two numbers of int64."""

    def edit(text: str) -> str:
        found = list(re.finditer(rf'{key}="([^"]*)"', text))[-1]
        return text[: found.start(1)] + value + text[found.end(1) :]

    return edit


LAUGHS = '<!DOCTYPE net [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;">]>'
BAD = {
    "entities": (lambda text: text.replace("<net", f"{LAUGHS}<net"), "document type"),
    "DTD": (lambda text: text.replace("<net", '<!DOCTYPE net SYSTEM "http://x/y.dtd"><net'), "document type"),
    "cut off": (lambda text: text[:500], "is not XML"),
    "empty": (lambda text: "", "is not XML"),
    "NUL": (lambda text: "\0" + text, "is not XML"),
    "encoding": (lambda text: text.replace('"1.0"', '"1.0" encoding="x-none"'), "is not XML"),
    "another root": (lambda text: "<svg/>", "no description of an OpenVINO graph"),
    "deep": (lambda text: "<net>" + "<deeper>" * 5000, "deep"),
    "attribute": (
        lambda text: text.replace("<net", f'<net of="{"a" * (20 << 20)}"', 1),
        "a tag or comment at byte 22 is",
    ),
    "comment": (lambda text: text.replace("<net", f"<!--{'a' * (20 << 20)}--><net", 1), "longer than 1048576 bytes"),
    "two layers": (lambda text: text.replace('<layer id="2"', '<layer id="1"', 1), "two layers have the number 1"),
    "offset": (const("offset", "-8"), "is no offset"),
    "digits": (const("offset", "9" * 5000), "is no offset"),
    "behind the end": (const("offset", "100000"), "ends at byte 100016"),
    "size": (const("size", "8"), "8 bytes are stored, its shape needs 16"),
    "shape": (const("shape", "1152921504606846976"), "its shape needs 9223372036854775808"),
    "negative shape": (const("shape", "-2"), "is no shape"),
    "shape that OpenVINO cuts": (const("shape", "1 2"), "'1 2' is no shape"),
    "type by an alias": (const("element_type", "I64"), "'I64' is no type that OpenVINO writes"),
    "inline": (const("element_type", 'i64" value="01234567'), "constant 'Constant_[0-9]+' is not in the .bin"),
    "number of a layer": (lambda text: text.replace('<layer id="2"', '<layer id="02"', 1), "the id '02' is no plain"),
    "number of a port": (lambda text: re.sub(r'(<input>\s*<port id=")', r"\1+", text, count=1), r"the id '\+0' is no"),
    "end of an edge": (
        lambda text: re.sub(r'(<edges>\s*<edge from-layer=")', r"\1 ", text, count=1),
        "from-layer ' [0-9]+' is no",
    ),
    "two edges": (
        lambda text: text.replace("<edges>", '<edges><edge from-layer="9" from-port="0" to-layer="3" to-port="0"/>'),
        "an input of layer 3 has two edges",
    ),
}


@pytest.mark.parametrize(("edit", "message"), BAD.values(), ids=BAD)
def test_descriptions_that_are_refused(edit: Callable[[str], str], message: str, honest: Path, tmp_path: Path) -> None:
    path = spoilt(honest, tmp_path, edit)
    refused(path, message, trust=True)
    with pytest.raises(Refused, match=message):
        Opening(tmp_path).open(str(path))
    with pytest.raises(Refused, match=message):
        profile_file(path)


@pytest.mark.parametrize("inside", ["<a/>" * 1000, "<a " + " ".join(f'a{n}=""' for n in range(1000)) + "/>"])
def test_elements_and_attributes_are_counted(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MOST_ELEMENTS", 1000)
    (tmp_path / "m.xml").write_text(f"<net>{inside}</net>")
    refused(tmp_path / "m.xml", "more than 1000 elements and attributes")


NO_TRIPS = '<edges><edge from-layer="0" from-port="0" to-layer="3" to-port="0"/></edges>'
OTHER_DATA = '<data element_type="string" shape="" offset="0" size="8"/>'


@pytest.mark.parametrize(
    ("before", "added", "message"),
    [
        pytest.param("</net>", NO_TRIPS, "one 'net' has 'edges' twice", id="edges"),
        pytest.param("</net>", f"<rt_info>{NO_TRIPS}</rt_info>", "'edges' are not in a graph", id="notes"),
        pytest.param("<output>", OTHER_DATA, "one 'layer' has 'data' twice", id="data"),
        pytest.param("</layer>", f"<rt_info><layer>{OTHER_DATA}</layer></rt_info>", "rounds", id="data-of-notes"),
    ],
)
def test_what_openvino_does_not_read_hides_no_loop(before: str, added: str, message: str, tmp_path: Path) -> None:
    """OpenVINO reads the first of several sections: a later one that says otherwise was believed."""
    path = saved(tmp_path / "m.xml", trips=2**40)
    start, end = path.read_text().split('name="Constant_', 1)
    path.write_text(f'{start}name="Constant_{end.replace(before, added + before, 1)}')
    refused(path, message)


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [("Loop", "loop", "rounds"), ("Broadcast", "BROADCAST", "elements"), ("Const", "Constant", "ends at byte")],
)
def test_types_are_read_as_openvino_reads_them(kind: str, other: str, message: str, tmp_path: Path) -> None:
    """OpenVINO takes no notice of case, and Constant for Const: such layers were bounded by nothing."""
    path = saved(tmp_path / "m.xml", trips=2**40 if kind == "Loop" else 5, size=2**40 if kind == "Broadcast" else 4)
    text = path.read_text().replace(f'type="{kind}"', f'type="{other}"')
    path.write_text(const("offset", "100000")(text) if kind == "Const" else text)
    refused(path, message)


def test_files_that_are_none(honest: Path, tmp_path: Path) -> None:
    path = spoilt(honest, tmp_path, str)
    path.with_suffix(".bin").unlink()
    refused(path, "stored in 'm.bin', which is not beside it")
    os.mkfifo(path.with_suffix(".bin"))
    refused(path, "is a fifo")
    path.unlink()
    os.mkfifo(path)
    refused(path, "is a fifo")
    refused(tmp_path, "is a directory")


def test_weights_that_are_a_link_out_of_the_folder(honest: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    path = spoilt(honest, tmp_path / "inner", str)
    path.with_suffix(".bin").rename(tmp_path / "secret")
    path.with_suffix(".bin").symlink_to("../secret")
    refused(path, "a link out of the folder of 'm.xml'", trust=True)


def test_a_download_cache_of_links_is_one_folder(honest: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    spoilt(honest, tmp_path / "blobs", str)
    for name in ("m.xml", "m.bin"):
        (tmp_path / "blobs" / name).rename(tmp_path / "blobs" / name[-3:])  # as those of Hugging Face are digests
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name[-3:])
    link = tmp_path / "snapshot" / "m.xml"
    check_ir(link)
    assert ends_of(link) == ends_of(honest)
    with Fleet([find_target("openvino").open(link)], threads=1) as fleet:
        assert len(fleet.sessions) == 1


@pytest.mark.parametrize(("trips", "message"), [(2**40, "may run 1099511627776 rounds"), (-1, "has no last round")])
def test_loops_that_do_not_end(trips: int, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.xml", trips=trips)
    refused(path, message)
    check_ir(path, trust=True)


def test_rounds_that_constants_are_computed_to(tmp_path: Path) -> None:
    """OpenVINO folds them: a sum of constants went round the limit."""
    path = saved(tmp_path / "m.xml", trips=2**62, computed=True)
    refused(path, "computes its rounds from constants")
    check_ir(path, trust=True)


@pytest.mark.parametrize("trips", [np.nan, np.inf, -np.inf])
def test_a_loop_of_no_number_of_rounds(trips: float, tmp_path: Path) -> None:
    """The number lies in the ``.bin``, of another type than the loop's."""
    path = saved(tmp_path / "m.xml")
    text, data = path.read_text(), path.with_suffix(".bin")
    path.write_text(text.replace('element_type="i64" shape="" ', 'element_type="f64" shape="" '))
    assert path.read_text() != text and data.read_bytes().count(struct.pack("<q", 5)) == 1
    data.write_bytes(data.read_bytes().replace(struct.pack("<q", 5), struct.pack("<d", trips)))
    refused(path, "has no last round")


def test_many_rounds_of_many_layers(tmp_path: Path) -> None:
    refused(saved(tmp_path / "m.xml", trips=9_000_000), "layers are executed")


def test_constants_that_grow(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.xml", size=2**40)
    refused(path, "makes 4398046511104 elements")
    check_ir(path, trust=True)


def test_an_honest_file_opens(honest: Path, tmp_path: Path) -> None:
    check_ir(honest)
    assert len(read_model(honest).inputs) == 1
    artifact = Opening(tmp_path).open(str(honest)).artifact
    assert artifact.inputs[0].shape == (1, 4) and artifact.notes == ()


def test_layers_that_keep_a_state_are_told(tmp_path: Path) -> None:
    op = ov.opset13
    x = op.parameter([1, 4], np.float32, name="x")
    seen = ov.opset6.read_value(op.constant(np.zeros((1, 4), np.float32)), "seen", ov.Type.f32, [1, 4])
    total = op.add(x, seen)
    model = ov.Model([op.result(total)], [ov.opset6.assign(total, "seen")], [x], "net")
    ov.save_model(model, tmp_path / "m.xml", compress_to_fp16=False)
    (tmp_path / "m.xml").write_text((tmp_path / "m.xml").read_text().replace("ReadValue", "readvalue"))
    (note,) = Opening(tmp_path).open(str(tmp_path / "m.xml")).artifact.notes
    assert "keeps a state, by Assign, ReadValue:" in note


def _held(rows: int, kind: type = np.float32) -> Any:
    return ov.opset13.constant(np.ones((rows, 3), kind))


def _multiplied(x: Any, table: Any) -> Any:
    return ov.opset13.matmul(x, table, False, False)


def _scaled(rows: int) -> Any:
    op = ov.opset13  # as weights of few bits are stored
    return op.multiply(op.convert(np.ones((1, 3), np.float16), "f32"), op.convert(_held(rows, np.int8), "f32"))


FACTORS: dict[str, tuple[Callable[[int], Any], Callable[[Any, Any], Any]]] = {
    "stored": (_held, _multiplied),
    "converted": (lambda rows: ov.opset13.convert(_held(rows, np.float16), "f32"), _multiplied),
    "scaled": (_scaled, _multiplied),
    "computed": (
        lambda rows: ov.opset13.abs(ov.opset13.transpose(np.ones((3, rows), np.float32), np.array([1, 0]))),
        _multiplied,
    ),
    "summed": (_held, lambda x, table: ov.opset13.einsum([x, table], "ab,bc->ac")),
    "convolved": (
        lambda rows: ov.opset13.constant(np.ones((3, rows, 1), np.float32)),
        lambda x, table: ov.opset13.convolution(ov.opset13.unsqueeze(x, np.array([2])), table, [1], [0], [0], [1]),
    ),
    "keys": (
        lambda rows: ov.opset13.constant(np.ones((1, rows, 4), np.float32)),
        lambda x, table: ov.opset13.scaled_dot_product_attention(np.ones((1, 1, 4), np.float32), table, table),
    ),
}


@pytest.mark.parametrize(("factor", "product"), FACTORS.values(), ids=FACTORS)
def test_products_sum_over_something(factor: Any, product: Any, tmp_path: Path) -> None:
    """With nothing to sum over the answer is what the run before has left in memory."""
    path = tmp_path / "m.xml"
    for rows in (4, 0):
        x = ov.opset13.parameter([1, rows], np.float32, name="x")
        model = ov.Model([ov.opset13.result(product(x, factor(rows)))], [x], "net")
        ov.save_model(model, path, compress_to_fp16=False)
        if rows:
            check_ir(path)
    for size in ("1", "0"):  # OpenVINO stores a byte of none
        path.write_text(path.read_text().replace(' size="1"', f' size="{size}"'))
        check_ir(path, trust=True)
        refused(path, "multiplies nothing in '[A-Za-z]+_[0-9]+': its answer is what lay in memory")


FORGED = {
    "none": None, "text": "abc", "pairs": [["x", [1]]], "no name": [[1, [1], "int8"]], "sizes": [["x", 4, "float32"]],
    "negative": [["x", [-1], "float32"]], "truth": [["x", [True], "float32"]], "large": [["x", [2**63], "float32"]],
    "word": [["x", ["batch\n::error::"], "float32"]], "deep": [["x", [1] * 65, "float32"]],
    "object": [["x", [1], "object"]], "list": [["x", [1], ["float32"]]],
}  # fmt: skip


@pytest.mark.parametrize("answer", FORGED.values(), ids=FORGED)
def test_what_a_child_says_that_a_file_takes(answer: object, honest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ([answer, []], [[], answer], answer):
        monkeypatch.setattr(sandbox, "call", lambda *_, told=told, **__: sandbox.Answer(told, ()))
        with pytest.raises(Refused, match="gave no answer"):
            ends_of(honest)


def test_a_layer_of_an_extension_loads_nothing(honest: Path, tmp_path: Path) -> None:
    path = spoilt(
        honest,
        tmp_path,
        lambda text: text.replace('type="Broadcast" version="opset3"', 'type="Odd" version="extension"'),
    )
    check_ir(path)
    with pytest.raises(Refused, match="OpenVINO cannot open"):
        read_model(path)


@given(place=st.integers(0, 2**16), new=st.characters(codec="ascii"))
def test_a_description_with_a_letter_changed_is_read_or_refused(
    honest: Path, tmp_path_factory: pytest.TempPathFactory, place: int, new: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = spoilt(honest, folder, lambda text: text[: place % len(text)] + new + text[place % len(text) + 1 :])
    try:
        check_ir(path)
    except Refused:
        return


def test_a_long_chain_that_many_layers_read_is_walked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 400
    numbers = range(1, 2 * count + 1)
    ports = '<input><port id="0"/><port id="1"/></input>'
    layers = [f'<layer id="{n}" type="{"Reshape" if n <= count else "Tile"}">{ports}</layer>' for n in numbers]
    edges = [f'<edge from-layer="{min(n - 1, count)}" to-layer="{n}" to-port="{int(n > count)}"/>' for n in numbers]
    begin = '<net><layers><layer id="0" type="Parameter"/>'
    (tmp_path / "m.xml").write_text(f"{begin}{''.join(layers)}</layers><edges>{''.join(edges)}</edges></net>")
    walked, source = [], Body.source
    monkeypatch.setattr(Body, "source", lambda *place: walked.append(place) or source(*place))
    check_ir(tmp_path / "m.xml")
    assert count < len(walked) < 5 * count
