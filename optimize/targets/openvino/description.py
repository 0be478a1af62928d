"""The description of an OpenVINO graph (``.xml``) as plain layers, read without a DTD and within limits."""

from __future__ import annotations

import re
import xml.parsers.expat as expat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

from optimize.errors import Refused
from optimize.regular import require_file, shown
from optimize.targets.base import SAID

#: Of a description; weights lie beside it. And of one tag, comment or name in it: the parser starts again at its first
#: byte whenever more of it comes, and hears no Ctrl-C before the piece that it was given is read.
MOST_BYTES, MOST_TAG_BYTES, _PIECE_BYTES = 2**27, 2**20, 2**16
#: Layers with those of all bodies, and elements inside one another (a body of a loop is three of them deeper).
MOST_LAYERS, MOST_DEPTH = 250_000, 192
#: Elements and their attributes; a layer has some fifty with its edges.
MOST_ELEMENTS = 2**22
_BODIES = frozenset({"net", "body", "then_body", "else_body"})
#: Sections of a graph, and what a layer has one of: OpenVINO reads the first in its place, and none elsewhere.
_SECTIONS, _SINGLE = frozenset({"layers", "edges"}), frozenset({"data", "input"})
#: Types of stored weights that are rounded.
_KEPT = ("element_type", "shape", "offset", "size")
_INTEGERS, _HALVES = {"i8", "u8", "i4", "u4", "u1", "nf4"}, {"bf16": "bfloat16", "f16": "float16"}
_OF_CHANCE = {kind.lower(): kind for kind in ("Assign", "Multinomial", "RandomUniform", "ReadValue")}
_HINT = "Write it again with openvino.save_model."


@dataclass
class IrLayer:
    """One layer.

    Attributes:
        number: Its number in its graph.
        kind: Its type in lower case, such as ``const``: OpenVINO takes no notice of case.
        data: What its ``data`` element says of what is stored.
        ports: Numbers of its inputs, in order.
        bodies: What it executes inside.
    """

    number: str
    name: str
    kind: str
    data: Mapping[str, str] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)


@dataclass
class Body:
    """A graph.

    Attributes:
        layers: By their numbers.
        sources: The number of the layer that feeds an input, by the numbers of the layer and the input.
        said: What the outermost graph says of itself, by the words of ``SAID``.
    """

    layers: dict[str, IrLayer] = field(default_factory=dict)
    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    @property
    def of_chance(self) -> set[str]:
        """The layers that draw numbers or keep a state, those of inner graphs included."""
        inner = (part.of_chance for layer in self.layers.values() for part in layer.bodies)
        return {_OF_CHANCE[layer.kind] for layer in self.layers.values() if layer.kind in _OF_CHANCE}.union(*inner)

    @property
    def precision(self) -> str:
        """``int8`` where it quantizes, the half type that it stores weights in; else empty."""
        layers = self.layers.values()
        stored = {layer.data.get("element_type", "") for layer in layers if layer.kind == "const"}
        if any(layer.kind in ("fakequantize", "fakeconvert") for layer in layers) or stored & _INTEGERS:
            return "int8"
        return next((name for kind, name in _HALVES.items() if kind in stored), "")

    def source(self, layer: IrLayer, place: int) -> IrLayer | None:
        """Return the layer that feeds an input, counted from 0."""
        port = layer.ports[place] if place < len(layer.ports) else str(place)
        return self.layers.get(self.sources.get((layer.number, port), ""))


def read_description(path: Path) -> Body:
    """Return the graph of a description.

    Raises:
        Refused: It is no regular file, too large, no XML of OpenVINO, has a DTD, nests too deep, or has more elements
            or longer tags than any graph; the message says which.
    """
    require_file(path, most_bytes=MOST_BYTES)
    reader = _Reader(path)
    parser = expat.ParserCreate(intern=None)  # else it keeps each name that there is
    parser.StartElementHandler, parser.EndElementHandler = reader.begin, reader.end
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = reader.refuse_dtd
    try:
        with path.open("rb") as file:
            reader.read(parser, file)
    except OSError as error:
        raise Refused(f"'{shown(path)}' cannot be read: {error.strerror}.", hint="Check the path.") from error
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise Refused(f"'{shown(path)}' is not XML: {shown(str(error))}.", hint=_HINT) from error
    return reader.net


class _Reader:
    """Collects layers and edges while the elements of a description go by."""

    def __init__(self, path: Path) -> None:
        self.net, self._path = Body(), path
        self._bodies: list[Body] = []
        self._layers: list[IrLayer] = []
        self._open: list[str] = []
        self._had: list[set[str]] = [set()]
        self._count = self._elements = 0

    def read(self, parser: expat.XMLParserType, file: BinaryIO) -> None:
        """Give a file to a parser that tells this reader what goes by."""
        given = at = 0
        while piece := file.read(_PIECE_BYTES):
            parser.Parse(piece, False)
            given += len(piece)
            at = max(at, parser.CurrentByteIndex)  # -1 where expat waits for more of a tag
            if given - at > MOST_TAG_BYTES:
                self._refuse(f"a tag or comment at byte {at} is longer than {MOST_TAG_BYTES} bytes")
        parser.Parse(b"", True)

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        """Take in the start of an element."""
        parent = self._open[-1] if self._open else ""
        self._open.append(name)
        self._elements += 1 + len(attributes)
        if self._elements > MOST_ELEMENTS:
            self._refuse(f"it has more than {MOST_ELEMENTS} elements and attributes")
        self._refuse_hidden(name, parent)
        if (name == "net") != (not parent):
            self._refuse("it is no description of an OpenVINO graph")
        if len(self._open) > MOST_DEPTH:
            self._refuse(f"its elements are more than {MOST_DEPTH} deep")
        if name in _BODIES:
            self._begin_body()
        elif name == "layer" and parent == "layers":
            self._begin_layer(attributes)
        elif self._open[-3:] == ["layers", "layer", "data"]:
            if "value" in attributes and self._layers[-1].kind == "const":
                self._refuse(f"the constant '{shown(self._layers[-1].name)}' is not in the .bin")
            self._layers[-1].data = {key: attributes[key] for key in _KEPT if key in attributes}
        elif self._open[-4:] == ["layers", "layer", "input", "port"]:
            self._layers[-1].ports.append(self._number(attributes, "id"))
        elif parent == "edges" and name == "edge":
            self._join(attributes)
        elif self._open[:-1] == ["net", "rt_info", "optimize"] and name in SAID:
            self.net.said[name] = attributes.get("value", "")

    def end(self, name: str) -> None:
        """Take in the end of an element."""
        self._open.pop()
        self._had.pop()
        if name in _BODIES:
            self._bodies.pop()
        elif name == "layer" and self._open[-1:] == ["layers"]:
            self._layers.pop()

    def refuse_dtd(self, *_: object) -> None:
        """Refuse a document type or an entity, which OpenVINO never writes."""
        self._refuse("it has a document type or entities, which OpenVINO never writes")

    def _refuse_hidden(self, name: str, parent: str) -> None:
        """Refuse what OpenVINO does not read where it stands, so that both of us read the same."""
        if name in _SECTIONS and parent not in _BODIES:
            self._refuse(f"'{name}' are not in a graph")
        if name in self._had[-1] and (name in _SECTIONS or (name in _SINGLE and parent == "layer")):
            self._refuse(f"one '{parent}' has '{name}' twice")
        if name in _SECTIONS or name in _SINGLE:
            self._had[-1].add(name)
        self._had.append(set())

    def _begin_body(self) -> None:
        body = Body() if self._bodies else self.net
        if self._bodies and self._layers:
            self._layers[-1].bodies.append(body)
        self._bodies.append(body)

    def _begin_layer(self, attributes: Mapping[str, str]) -> None:
        number, kind = self._number(attributes, "id"), attributes.get("type", "").lower()
        layer = IrLayer(number, attributes.get("name", ""), "const" if kind == "constant" else kind)
        self._count += 1
        if self._count > MOST_LAYERS:
            self._refuse(f"it has more than {MOST_LAYERS} layers")
        if number in self._bodies[-1].layers:
            self._refuse(f"two layers have the number {shown(number)}")
        self._bodies[-1].layers[number] = layer
        self._layers.append(layer)

    def _join(self, edge: Mapping[str, str]) -> None:
        source, layer, port = (self._number(edge, end) for end in ("from-layer", "to-layer", "to-port"))
        if self._bodies[-1].sources.setdefault((layer, port), source) != source:
            self._refuse(f"an input of layer {layer} has two edges")

    def _number(self, attributes: Mapping[str, str], key: str) -> str:
        """Return a number as OpenVINO writes it; it reads ``01`` and `` 1`` as 1, too."""
        text = attributes.get(key, "")
        if not re.fullmatch(r"0|[1-9][0-9]{0,18}", text):
            self._refuse(f"the {key} '{shown(text)}' is no plain number")
        return text

    def _refuse(self, reason: str) -> NoReturn:
        raise Refused(f"'{shown(self._path)}' is refused: {reason}.", hint=_HINT)
