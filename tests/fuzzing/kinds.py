"""What is mutated how: a kind of file, its mutations, and the rules that open it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.fuzzing import arrays, bytewise, hostile, jsons, markup, modules, pickled, protobufs, rules, scripts, zips
from tests.fuzzing.honest import Files

Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: What the command line calls it.
        changes: Mutations of the file that is opened, each as often as it is listed.
        rules: Opens a mutated file as the product does.
        door: The command that opens it, with ``{}`` for the file; empty where only Python does.
    """

    name: str
    changes: tuple[Change, ...]
    rules: Callable[[Path, rules.Here], None]
    door: str = ""

    def mutated(self, honest: list[Files], seed: int, number: int) -> Files:
        """Return a mutated file and those beside it; the same for the same numbers."""
        chance = random.Random(f"{self.name}/{seed}/{number}")
        files = dict(chance.choice(honest))
        names = list(files)
        chosen = names[0] if len(names) == 1 or chance.random() < 0.8 else chance.choice(names[1:])
        change = chance.choice(self.changes) if chosen == names[0] else _BESIDE[Path(chosen).suffix]
        files[chosen] = change(files[chosen], chance)
        return files


def _in_zip(ending: str, change: Change) -> Change:
    return lambda data, chance: zips.edited(
        data, chance, lambda name: name.endswith(ending), lambda held: change(held, chance)
    )


def _operator(data: bytes, chance: random.Random) -> bytes:
    """Let a call of a graph, exported or taken over, be of any operator that torch has."""
    found, name = json.loads(data), hostile.operator(chance)
    if "calls" in found:
        chance.choice(found["calls"])["operator"] = name.removeprefix("torch.ops.")
    else:
        chance.choice(found["graph_module"]["graph"]["nodes"])["target"] = name
    return json.dumps(found).encode()


def _value_name(data: bytes, chance: random.Random) -> bytes:
    """Give a value of an exported graph another name, everywhere."""
    names = list(json.loads(data)["graph_module"]["graph"]["tensor_values"])
    return jsons.renamed(data, chance, names, hostile.text(chance, names))


def _weight_name(data: bytes, chance: random.Random) -> bytes:
    """Give a weight of an archive another name, in its table and in the signature."""
    members = zips.read(data)
    tables = [member for member in members if member.name.endswith(b"weights_config.json")]
    names = [name for member in tables for name in json.loads(member.data)["config"]]
    old, new = chance.choice(names), hostile.text(chance, names)
    for member in members:
        if member.name.endswith(b".json"):
            member.data = member.data.replace(json.dumps(old).encode(), json.dumps(new).encode())
    return zips.write(members)


_PICKLE = _in_zip("data.pkl", pickled.mutated)
_GRAPH, _EXAMPLE = "models/model.json", "sample_inputs/model.pt"
_BESIDE: dict[str, Change] = {".bin": bytewise.mutated, ".safetensors": arrays.mutated_safetensors}
_STRUCTURE = (bytewise.mutated, zips.mutated, zips.mutated)
_MODULE, _OLD_MODULE = (partial(modules.mutated, zipped=zipped) for zipped in (True, False))
_OLD_PICKLES = partial(pickled.mutated, pickles=5)
_EXPORTED = (
    *[_in_zip(_GRAPH, jsons.mutated)] * 3, _in_zip(_GRAPH, _operator), _in_zip(_GRAPH, _value_name), _weight_name,
    _in_zip("config.json", jsons.mutated), _in_zip(_EXAMPLE, zips.mutated), _in_zip(_EXAMPLE, _PICKLE),
)  # fmt: skip
_SHOW, _SHAPE = "show {} --text", "--input-shape 3,8"
_WEIGHTS = f"{_SHOW} --model tests.fuzzing.rules:dense {_SHAPE}"
KINDS = {
    kind.name: kind
    for kind in (
        Kind("module", (*_STRUCTURE, *[_PICKLE, _MODULE] * 2), rules.open_torch, f"{_SHOW} {_SHAPE}"),
        Kind("legacy", (bytewise.mutated, *[_OLD_PICKLES] * 2, _OLD_MODULE), rules.open_torch, f"{_SHOW} {_SHAPE}"),
        Kind("state", (*_STRUCTURE, *[_PICKLE] * 2), rules.open_torch, _WEIGHTS),
        Kind("pt2", (*_STRUCTURE, *_EXPORTED), rules.open_torch, _SHOW),
        Kind("torchscript", (*_STRUCTURE, *[scripts.mutated] * 5, _PICKLE), rules.open_torch, f"{_SHOW} {_SHAPE}"),
        Kind("safetensors", (arrays.mutated_safetensors,), rules.open_torch, _WEIGHTS),
        Kind("onnx", (bytewise.mutated, *[protobufs.mutated] * 4), rules.open_onnx, "profile {}"),
        Kind("openvino", (bytewise.mutated, *[markup.mutated] * 4), rules.open_openvino, "profile {}"),
        Kind("npy", (arrays.mutated_npy,), rules.open_arrays),
        Kind("npz", (arrays.mutated_npz,), rules.open_arrays),
        Kind("taken", (bytewise.mutated, *[jsons.mutated] * 6, _operator), rules.open_taken),
    )
}
