"""``.pt2`` files of torch.export.save, read by this reader alone: nothing of one is handed to torch's own.

``torch.export.load`` trusts its file: it unpickles members, evaluates sizes and guards with ``eval`` and ``exec``,
walks to operators by attribute, imports classes of input trees, and writes names into generated source. Here the JSON
of the graph becomes a `description`, which has no place for any of that. What is not needed is not read: the
expressions of sizes and the guards (capturing the graph again finds sizes anew), stack traces, compiled code. Tensors
are made of raw bytes (`graph_json`). Only example inputs are a pickle in every file of torch; it is read by torch's
restricted unpickler with nothing added, in a confined process.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize.dimensions import FreeSize
from optimize.errors import Refused, first_line, spell
from optimize.load import names, operators
from optimize.load.archive import Archive
from optimize.load.description import Malformed, build, read_tree
from optimize.load.graph_json import GraphReading, read_tensors
from optimize.load.pickles import wanted_globals
from optimize.preparation import leave_out, said_of_fixed
from optimize.progress import quiet

_HINT = "Add --trust if you trust this file, or export the model again with torch.export.save."
_SCHEMA = 8
_GIVEN = {"user_input", "constant_input"}
#: Torch's names of what arranges values, and ours.
_TREES = {
    "builtins.tuple": "tuple",
    "builtins.list": "list",
    "builtins.dict": "dict",
    "collections.OrderedDict": "ordered",
}


@dataclass(frozen=True)
class Exported:
    """An exported program as this package reads one.

    Attributes:
        module: Its graph: one placeholder an input, weights as attributes, a flat tuple of outputs.
        inputs: Its example inputs, flat; None where it holds none.
        in_spec: How a caller's ``(args, kwargs)`` flatten.
        out_spec: How the outputs unflatten.
        free: Its free sizes, by the place of an input and the dimension.
        notes: What the user should know.
    """

    module: fx.GraphModule
    inputs: tuple[torch.Tensor, ...] | None
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    free: dict[tuple[int, int], FreeSize]
    notes: tuple[str, ...]


def read(archive: Archive, name: str) -> Exported:
    """Read a ``.pt2``.

    Args:
        archive: The open file.
        name: What to call it in an error.

    Raises:
        Refused: It holds code, or something that this reader does not know; the message names it.
    """
    try:
        return _read(archive, name)
    except operators.NotListed as error:
        raise Refused(f"'{name}' calls {str(error)[:100]}, which may be code.", hint=_HINT) from error
    except Malformed as error:
        raise Refused(f"'{name}' holds what no exported program holds: {error}.", hint=_HINT) from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        what = f"'{name}' is a torch.export program that cannot be read: {spell(error)[:120]}."
        raise Refused(what, hint="Save or download the file again.") from error


def _read(archive: Archive, name: str) -> Exported:
    models = [member for member in archive if re.fullmatch(r"models/[\w\-]+\.json", member)]
    if len(models) != 1:
        raise Malformed(f"it holds {len(models)} models, and one is read")
    model = models[0].removeprefix("models/").removesuffix(".json")
    content = json.loads(archive.read(models[0]))
    if int(content["schema_version"]["major"]) != _SCHEMA:
        raise Malformed(f"its schema is version {content['schema_version']['major']}, not {_SCHEMA}")
    weights, constants = (
        read_tensors(archive, kind, f"data/{kind}/{model}_{kind}_config.json") for kind in ("weights", "constants")
    )
    if both := weights.keys() & constants.keys():
        raise Malformed(f"'{min(both)}' is a weight and a constant")
    tensors = {**weights, **constants}
    graph_module = content["graph_module"]
    reading = GraphReading(names.identifiers_of_paths(tensors))
    found = reading.read(graph_module["graph"], graph_module["signature"])
    module = build(found, {reading.paths[path]: tensor for path, tensor in tensors.items()}, functional=False)
    root = next(entry["signature"] for entry in graph_module["module_call_graph"] if entry["fqn"] == "")
    given = [entry for entry in graph_module["signature"]["input_specs"] if entry.keys() & _GIVEN]
    fixed = {place: entry["constant_input"]["name"] for place, entry in enumerate(given) if "constant_input" in entry}
    outputs = [
        entry["user_output"]["arg"] for entry in graph_module["signature"]["output_specs"] if "user_output" in entry
    ]
    out_spec, left = leave_out(_spec(root["out_spec"]), [at for at, held in enumerate(outputs) if "as_none" in held])
    rewritten = {path: chosen for path, chosen in reading.paths.items() if path != chosen}
    return Exported(
        module.eval(),
        _examples(archive, f"data/sample_inputs/{model}.pt", name, fixed),
        leave_out(_spec(root["in_spec"]), fixed)[0],
        out_spec,
        _free(graph_module["graph"]["tensor_values"], found.inputs, content["range_constraints"]),
        (*left, *said_of_fixed([*fixed.values()]), *([names.told(rewritten)] if rewritten else [])),
    )


def _free(
    values: Mapping[str, Any], inputs: Sequence[str], ranges: Mapping[str, Any]
) -> dict[tuple[int, int], FreeSize]:
    """Return the sizes that the program leaves free, but for those that it computes of others."""
    found = {}
    for place, name in enumerate(inputs):
        for dim, size in enumerate(values[name]["sizes"]):
            symbol = re.fullmatch(r"Symbol\('(\w+)'(, \w+=True)*\)", size.get("as_expr", {}).get("expr_str", ""))
            limits = ranges.get(symbol[1]) if symbol else None
            if limits is not None:
                found[place, dim] = FreeSize.between(limits["min_val"], limits["max_val"])
    return found


def _examples(archive: Archive, member: str, name: str, fixed: Collection[int]) -> tuple[torch.Tensor, ...] | None:
    """Return the example inputs, flat, without what is fixed; the one member that torch always pickles."""
    if member not in archive:
        return None
    data = archive.read(member)
    if not data:  # torch writes so what it has none of
        return None
    try:
        held = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, TypeError, KeyError) as error:
        wanted = wanted_globals(_pickle_in(data))
        reason = f"it wants {', '.join(wanted)}" if wanted else first_line(error)[:200]
        raise Refused(f"'{name}' has a pickle inside ({member}) that may be code: {reason}.", hint=_HINT) from error
    if held is None:
        return None
    leaves = [leaf for place, leaf in enumerate(pytree.tree_leaves(held)) if place not in fixed]
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise Malformed("an example input is no tensor")
    return tuple(leaf.detach().contiguous().clone() for leaf in leaves)


def _pickle_in(data: bytes) -> bytes:
    try:
        return torch._C.PyTorchFileReader(io.BytesIO(data)).get_record("data.pkl")
    except RuntimeError:
        return data


def _spec(text: str) -> pytree.TreeSpec:
    """Return how values are arranged: tuples, lists and dicts with plain keys.

    Raises:
        Malformed: Something else arranges them.
    """
    if not text:
        raise Malformed("nothing says how inputs and outputs are arranged")
    _, tree = json.loads(text)
    return read_tree(_plain_tree(tree))


def _plain_tree(node: Mapping[str, Any]) -> Any:
    """Return torch's form of an arrangement in ours."""
    kind, children = node["type"], [_plain_tree(child) for child in node["children_spec"]]
    if kind is None:
        return "*"
    name = _TREES.get(kind, kind)
    return [name, json.loads(node["context"]), *children] if name in ("dict", "ordered") else [name, *children]


def read_trusted(file: IO[bytes]) -> torch.export.ExportedProgram:
    """Load a ``.pt2`` with torch's own reader on the CPU, running whatever code it holds; its log is kept quiet."""
    with quiet("torch.export", "torch.export.pt2_archive._package"):
        return torch.export.load(file)
