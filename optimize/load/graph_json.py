"""The JSON that torch's schema writes for a graph, translated to a description; what has no place there is refused.

Tensors are raw bytes with a dtype, sizes, strides and an offset, none of which is believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimize.errors import Refused
from optimize.load import operators
from optimize.load.archive import Archive
from optimize.load.description import NAME, Description, Malformed, OperatorCall
from optimize.named import free_name

#: Tensors may stand for so many times what is stored, and so many bytes more: some are broadcast, or seen in two ways.
_TIMES, _MORE_BYTES = 2, 64 << 20
#: The numbers that torch's schema gives to layouts and types.
LAYOUTS = {7: "strided"}
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 34: "uint32", 35: "uint64",
}  # fmt: skip


def read_tensors(archive: Archive, folder: str, table: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a table by name; entries of one member that are seen alike are one tensor.

    Raises:
        Malformed: One is not what it says, or all of them stand for far more than is stored.
    """
    if table not in archive:
        return {}
    found: dict[str, torch.Tensor] = {}
    storages: dict[str, torch.Tensor] = {}
    views: dict[tuple[str, str], torch.Tensor] = {}
    room = _MORE_BYTES
    for name, entry in json.loads(archive.read(table))["config"].items():
        member = entry["path_name"]
        if entry.get("use_pickle") is not False:
            raise Malformed(f"'{name[:80]}' is pickled")
        if not re.fullmatch(r"(weight|tensor)_\d+", str(member), re.ASCII):
            raise Malformed(f"'{name[:80]}' lies in '{str(member)[:80]}', which is no tensor")
        key = (member, json.dumps(entry["tensor_meta"], sort_keys=True))
        if member not in storages:
            storages[member] = _bytes_of(archive.read(f"data/{folder}/{member}"))
            room += _TIMES * len(storages[member])
        if key not in views:
            view = _view(storages[member], entry["tensor_meta"], name, room)
            room -= view.nbytes
            is_parameter = bool(entry.get("is_param")) and (view.is_floating_point() or view.is_complex())
            views[key] = torch.nn.Parameter(view, requires_grad=False) if is_parameter else view
        found[name] = views[key]
    return found


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _view(storage: torch.Tensor, meta: Mapping[str, Any], name: str, room: int) -> torch.Tensor:
    """Return the tensor that lies in raw bytes.

    Raises:
        Malformed: It would read outside them, or take more bytes than there is room for.
    """
    dtype = getattr(torch, DTYPES[meta["dtype"]])
    sizes, strides = ([_whole(entry["as_int"]) for entry in meta[key]] for key in ("sizes", "strides"))
    offset, length = _whole(meta["storage_offset"]["as_int"]), len(storage) // dtype.itemsize
    if meta["layout"] not in LAYOUTS or len(sizes) != len(strides):
        raise Malformed(f"'{name[:80]}' has no strided layout")
    count = 1
    for size in sizes:
        count *= size
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if count else offset
    if (count and last >= length) or count * dtype.itemsize > room or offset > length:
        raise Malformed(f"'{name[:80]}' has {count} values and {len(storage)} bytes")
    typed = storage[: length * dtype.itemsize].view(dtype) if length else torch.empty(0, dtype=dtype)
    return torch.as_strided(typed, sizes, strides, offset).clone()


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise Malformed(f"{str(value)[:40]} is no size")
    return value


_GROUPS = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
_PLAIN = ("as_int", "as_float", "as_bool", "as_string", "as_ints", "as_floats", "as_bools", "as_strings")
_NO_GRAD = "torch.ops.higher_order.wrap_with_set_grad_enabled"


@dataclass
class GraphReading:
    """Translates one graph; weights by the identifier paths they get."""

    paths: Mapping[str, str]
    calls: list[OperatorCall] = field(default_factory=list)
    #: What a value is called in the description, where an inlined graph calls it otherwise.
    known: dict[str, Any] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)

    def read(self, graph: Mapping[str, Any], signature: Mapping[str, Any]) -> Description:
        """Return the description of a graph.

        Raises:
            Malformed: It holds something that a description does not.
            operators.NotListed: It calls an operator that is not in the table.
            Refused: It returns something that is no tensor.
        """
        inputs, weights = [], {}
        for entry in signature["input_specs"]:
            ((kind, spec),) = entry.items()
            if kind in _GROUPS:
                weights[self._declare(spec["arg"]["name"])] = self.paths[spec[_GROUPS[kind]]]
            elif kind == "user_input":
                inputs.append(self._declare(spec["arg"]["as_tensor"]["name"]))
            elif kind != "constant_input":  # torch has written it into the graph
                raise Malformed(f"an input is a {kind}")
            elif not isinstance(name := spec.get("name"), str):
                raise Malformed(f"{str(name)[:80]!r} is no name")
        for node in graph["nodes"]:
            self._read_node(node)
        return Description(inputs, weights, self.calls, self._outputs(signature))

    def _outputs(self, signature: Mapping[str, Any]) -> list[str]:
        """Return the tensors that the caller gets; a buffer that gets a new value is written to, as in the module."""
        outputs = []
        buffers = {spec["buffer"]["buffer_name"]: spec["buffer"]["arg"]["name"]
                   for spec in signature["input_specs"] if "buffer" in spec}  # fmt: skip
        for place, entry in enumerate(signature["output_specs"]):
            ((kind, spec),) = entry.items()
            if kind == "user_output" and "as_tensor" in spec["arg"]:
                outputs.append(self._value(spec["arg"]["as_tensor"]["name"]))
            elif kind == "user_output" and "as_none" in spec["arg"]:
                continue
            elif kind == "buffer_mutation":
                arguments = [{"value": buffers[spec["buffer_name"]]}, {"value": self._value(spec["arg"]["name"])}]
                self.calls.append(OperatorCall(self._declare(f"mutation_{place}"), "aten.copy_.default", arguments))
            else:
                held = next(iter(spec["arg"])) if kind == "user_output" else kind
                raise Refused(
                    f"Output {place} of the exported program is {held.removeprefix('as_')}, not a tensor; "
                    "a deployed file returns tensors only.",
                    hint="Wrap the module so that it returns its tensors alone.",
                )
        return outputs

    def _read_node(self, node: Mapping[str, Any]) -> None:
        target = node["target"]
        if target == _NO_GRAD:
            self._inline(node)
            return
        operator = target.removeprefix("torch.ops.") if target.startswith("torch.ops.") else target
        if operator.startswith("aten.") and operator.split(".")[1] in operators.ASSERTIONS:
            return
        function = operators.find(operator)
        positional = [self._argument(entry["arg"]) for entry in node["inputs"] if entry.get("kind") != 2]
        keywords = {entry["name"]: self._argument(entry["arg"]) for entry in node["inputs"] if entry.get("kind") == 2}
        if isinstance(function, torch._ops.OpOverload):
            positional, keywords = _by_schema(function, node["inputs"], self._argument)
        self._call(node, operator, positional, keywords, _returns_several(function))

    def _call(
        self, node: Mapping[str, Any], operator: str, positional: list[Any], keywords: dict[str, Any], several: bool
    ) -> None:
        """Add a call, and a call each for the parts of a result that is several values."""
        outputs, modules = node["outputs"], _modules(node.get("metadata", {}))
        parts = outputs[0]["as_tensors"] if len(outputs) == 1 and "as_tensors" in outputs[0] else None
        if parts is None and not several:
            if outputs:
                self.calls.append(
                    OperatorCall(self._declare(_output_name(outputs[0])), operator, positional, keywords, modules)
                )
            return
        whole = self._declare(self._free_name(node.get("name") or "result"))
        self.calls.append(OperatorCall(whole, operator, positional, keywords, modules))
        for place, part in enumerate(outputs if parts is None else [{"as_tensor": entry} for entry in parts]):
            if "as_none" in part:
                continue
            self.calls.append(
                OperatorCall(
                    self._declare(_output_name(part)), "_operator.getitem", [{"value": whole}, place], {}, modules
                )
            )

    def _inline(self, node: Mapping[str, Any]) -> None:
        """Read the body of a region without gradients in its place: an inference graph has none anyway."""
        _, body, *arguments = (entry["arg"] for entry in node["inputs"])
        inner = body["as_graph"]["graph"]
        given = [self._argument(entry) for entry in arguments]
        outer, self.known = self.known, dict(self.known)
        for entry, value in zip(inner["inputs"], given, strict=True):
            self.known[_output_name(entry)] = value
        for entry in inner["nodes"]:
            self._read_node(entry)
        results = [self._argument(entry) for entry in inner["outputs"]]
        self.known = outer
        for entry, value in zip(_flat_outputs(node["outputs"]), results, strict=True):
            self.known[_output_name(entry)] = value

    def _argument(self, entry: Mapping[str, Any]) -> Any:
        """Return one argument in the form of a description."""
        ((kind, held),) = entry.items()
        if kind == "as_none":
            return None
        if kind in _PLAIN:
            return _number(held)
        if kind in ("as_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"):
            return self._reference(held)
        if kind in ("as_tensors", "as_sym_ints", "as_sym_floats", "as_sym_bools"):
            return [self._reference(part) for part in held]
        if kind in ("as_optional_tensors", "as_optional_tensor"):
            return [self._argument(part) for part in held] if isinstance(held, list) else self._argument(held)
        if kind in ("as_int_lists", "as_float_lists"):
            return [list(part) for part in held]
        if kind == "as_complex":
            return {"complex": [held["real"], held["imag"]]}
        if kind == "as_device":
            return {"device": held["type"]}
        for name, table in (("scalar_type", DTYPES), ("memory_format", _MEMORY_FORMATS), ("layout", LAYOUTS)):
            if kind == f"as_{name}":
                return {"dtype" if name == "scalar_type" else name: table[held]}
        raise Malformed(f"an argument is {kind.removeprefix('as_')}")

    def _reference(self, held: Mapping[str, Any]) -> Any:
        """Return a value by its name, or the number that stands in its place."""
        for key in ("as_int", "as_float", "as_bool"):
            if key in held:
                return _number(held[key])
        name = held["name"] if "name" in held else held["as_name"]
        return self.known.get(name, {"value": name})

    def _value(self, name: str) -> str:
        found = self.known.get(name, {"value": name})
        if not isinstance(found, dict) or "value" not in found:
            raise Malformed(f"'{name[:80]}' is returned and is no value")
        return str(found["value"])

    def _declare(self, name: str) -> str:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Malformed(f"{str(name)[:80]!r} is no name")
        own = self._free_name(name)  # a region has names of its own, which may be those of others
        self.known[name] = {"value": own}
        self.made.add(own)
        return own

    def _free_name(self, wanted: str) -> str:
        return free_name(re.sub(r"\W", "_", wanted, flags=re.ASCII), self.made)


def _by_schema(function: torch._ops.OpOverload, entries: Sequence[Mapping[str, Any]], argument: Any) -> Any:
    """Return the arguments of an operator by their places in its schema, whatever the file says of them."""
    places = {entry.name: entry for entry in function._schema.arguments}
    given: dict[str, Any] = {}
    for entry in entries:
        if entry["name"] not in places or entry["name"] in given:
            raise Malformed(f"{function} has no argument '{str(entry['name'])[:80]}', or has it twice")
        given[entry["name"]] = argument(entry["arg"])
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    contiguous = True
    for name, place in places.items():
        if name not in given:
            contiguous = False
        elif contiguous and not place.kwarg_only:
            positional.append(given[name])
        else:
            keywords[name] = given[name]
    return positional, keywords


def _returns_several(function: Any) -> bool:
    """Say whether an operator returns a tuple or a list, of which the parts are named."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    returns = function._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))


def _flat_outputs(outputs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if len(outputs) == 1 and "as_tensors" in outputs[0]:
        return [{"as_tensor": entry} for entry in outputs[0]["as_tensors"]]
    return list(outputs)


def _output_name(entry: Mapping[str, Any]) -> str:
    ((_, held),) = entry.items()
    return held["name"] if "name" in held else held["as_name"]


def _number(value: Any) -> Any:
    """Return a number, text or list of them; numbers that JSON has no word for come as texts."""
    if isinstance(value, list):
        return [_number(entry) for entry in value]
    if isinstance(value, float) and value != value:
        return {"float": "nan"}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"float": "inf" if value > 0 else "-inf"}
    if isinstance(value, str) and value in ("Infinity", "-Infinity", "NaN"):
        return {"float": {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}[value]}
    return value


def _modules(metadata: Mapping[str, Any]) -> list[list[str]]:
    """Return where a call came from, of ``key,path,class;...``; what is no plain path is left out."""
    entries = [entry.split(",") for entry in str(metadata.get("nn_module_stack", "")).split(";")]
    plain = r"[\w.@]*"
    return [
        [entry[1], entry[2]]
        for entry in entries
        if len(entry) == 3 and all(re.fullmatch(plain, part, re.ASCII) for part in entry[1:])
        and not entry[1].startswith("_empty_nn_module_stack")
    ]  # fmt: skip
