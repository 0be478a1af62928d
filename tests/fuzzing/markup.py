"""XML of OpenVINO with attributes and elements changed, and forms of XML that it never has."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree

from tests.fuzzing import hostile

_KINDS = (
    "Const", "Loop", "TensorIterator", "If", "Broadcast", "Tile", "Range", "Reshape", "Result", "Parameter",
    "ReadValue", "Convert", "Pad", "Interpolate", "OneHot", "Assign", "MatMul", "NonZero", "Eye", "StridedSlice",
)  # fmt: skip
_TYPES = ("f32", "f16", "i64", "i4", "u1", "boolean", "string", "undefined", "dynamic", "bf16", "nf4", "x")
_FORMS = (
    '<!DOCTYPE net [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>',
    f'<!DOCTYPE net SYSTEM "file://{hostile.MARKER}">',
    '<?xml-stylesheet href="x"?>', "<!-- -- -->", "<![CDATA[", "\0", "<net>", "</net>", "<x>" * 5000,
)  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return a description with one to three changes."""
    root = ElementTree.fromstring(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        chance.choice(_CHANGES)(root, chance)
    text = ElementTree.tostring(root, encoding="unicode")
    if chance.random() < 0.06:
        at = chance.choice((0, text.find(">") + 1, chance.randrange(len(text))))
        text = text[:at] + chance.choice(_FORMS) + text[at:]
    encoding = chance.choice(("utf-8",) * 20 + ("utf-16", "latin-1", "utf-7"))
    return text.encode(encoding, "replace")


def _word(chance: random.Random) -> str:
    word = chance.choice((
        hostile.text(chance), str(chance.choice(hostile.NUMBERS)), chance.choice(_TYPES), chance.choice(_KINDS),
        ",".join(str(chance.choice(hostile.NUMBERS)) for _ in range(chance.randrange(1, 4))),
    ))  # fmt: skip
    return "".join(letter for letter in word if letter.isprintable())


def _attribute(root: ElementTree.Element, chance: random.Random) -> None:
    element = chance.choice([element for element in root.iter() if element.attrib])
    element.attrib[chance.choice(list(element.attrib))] = _word(chance)


def _constant(root: ElementTree.Element, chance: random.Random) -> None:
    """Change the sizes or the place of a stored tensor."""
    held = [element for element in root.iter("data") if "offset" in element.attrib]
    if held:
        element = chance.choice(held)
        key = chance.choice(("offset", "size", "shape", "element_type"))
        element.attrib[key] = chance.choice(held).attrib.get(key, "") if chance.random() < 0.3 else _word(chance)


def _kind(root: ElementTree.Element, chance: random.Random) -> None:
    layers = list(root.iter("layer"))
    if layers:
        chance.choice(layers).attrib["type"] = chance.choice(_KINDS)


def _edge(root: ElementTree.Element, chance: random.Random) -> None:
    """Join another pair of layers: a circle, or a layer with itself."""
    edges = list(root.iter("edge"))
    if edges:
        one, other = chance.choice(edges), chance.choice(edges)
        key = chance.choice(("from-layer", "to-layer", "from-port", "to-port"))
        taken = chance.choice(("from-layer", "to-layer")) if "layer" in key else key
        one.attrib[key] = other.attrib.get(taken, "0")


def _drop(root: ElementTree.Element, chance: random.Random) -> None:
    parents = [element for element in root.iter() if len(element)]
    if parents:
        parent = chance.choice(parents)
        parent.remove(chance.choice(list(parent)))


def _double(root: ElementTree.Element, chance: random.Random) -> None:
    """Put an element, with all that is in it, in another place too."""
    elements = list(root.iter())
    copy = ElementTree.fromstring(ElementTree.tostring(chance.choice(elements)))
    chance.choice(elements).insert(0, copy)


def _tag(root: ElementTree.Element, chance: random.Random) -> None:
    elements = list(root.iter())
    chance.choice(elements).tag = chance.choice(elements).tag


def _deep(root: ElementTree.Element, chance: random.Random) -> None:
    element = chance.choice(list(root.iter()))
    for _ in range(chance.choice((10, 250))):
        element = ElementTree.SubElement(element, chance.choice(("body", "layer", "net", "layers")))


_CHANGES = (_attribute, _attribute, _constant, _constant, _kind, _edge, _drop, _double, _tag, _deep)
