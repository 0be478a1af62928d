"""Files that try to run a command, to eat the machine or to crash the process: refused, and nothing of it happens."""

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimize.errors import Refused
from optimize.frontend import capture
from optimize.load import ModelSource, load_trusted, stored
from optimize.load.identify import identify
from optimize.load.pickles import wanted_globals
from optimize.load.taking import look
from tests.load.files import Bomb, Command, described, load, rewritten, saved

CODE = "__import__('os').system('touch {marker}')"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "program.pt2"
    batch = torch.export.Dim("batch", min=1, max=64)
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    torch.export.save(torch.export.export(module, (torch.randn(2, 3),), dynamic_shapes=({0: batch},)), path)
    return path


def refused(path: Path, match: str) -> None:
    """As the user's process sees it: opened in a confined one."""
    with pytest.raises(Refused, match=match):
        look(path, identify(path))


def refused_here(path: Path, match: str) -> None:
    """By the rules alone, in this process, without the walls."""
    with pytest.raises(Refused, match=match):
        load(path)


def test_plain_pickle(tmp_path: Path, marker: Path) -> None:
    for protocol in (2, 4):
        (tmp_path / "m.pt").write_bytes(pickle.dumps(Command(marker), protocol))
        refused(tmp_path / "m.pt", "plain pickle")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_command_in_a_checkpoint(tmp_path: Path, marker: Path, zipped: bool, protocol: int) -> None:
    held = {"state_dict": nn.Linear(2, 2).state_dict(), "args": Command(marker)}
    torch.save(held, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    refused_here(tmp_path / "m.pt", r"wants posix\.system")


def test_command_hidden_from_the_scan(tmp_path: Path, marker: Path) -> None:
    """A name put together at run time is missed by the scan and refused by the unpickler."""
    hidden = b"\x80\x02X\x05\x00\x00\x00posixq\x00X\x06\x00\x00\x00systemq\x01\x93."
    torch.save({"a": 1}, tmp_path / "good.pt")
    rewritten(tmp_path / "good.pt", tmp_path / "m.pt", lambda name, data: hidden if name.endswith("data.pkl") else data)
    refused_here(tmp_path / "m.pt", "wants posix.system|not opened without trust")


def test_getattr_and_partial_stay_refused(tmp_path: Path, marker: Path) -> None:
    class Sly:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (torch.nn.Linear, "__init__")

    torch.save(Sly(), tmp_path / "m.pt")
    refused_here(tmp_path / "m.pt", r"wants builtins\.getattr")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("called", "given"),
    [
        (torch.FloatTensor, (9,)),
        (torch.Tensor, (9,)),
        (torch.UntypedStorage, (9,)),
        (torch._tensor._rebuild_from_type_v2, (torch.LongTensor, torch.Tensor, (9,), {})),
    ],
)
def test_memory_as_it_was_left_is_not_asked_for(tmp_path: Path, zipped: bool, called: Any, given: Any) -> None:
    """What another object left there went into the artifact."""

    class Sly:
        def __reduce__(self) -> tuple[Any, ...]:
            return called, given

    torch.save({"named": torch.FloatTensor, "w": Sly()}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    refused_here(tmp_path / "m.pt", r"wants torch\.[a-zA-Z_.0-9]+\(\)")


def test_a_call_is_found_by_way_of_the_memo_and_of_lists() -> None:
    by_memo = b"\x80\x02]q\x00(ctorch\nFloatTensor\nq\x01K\x01e0h\x01K\x09\x85R."
    assert wanted_globals(by_memo) == ["torch.FloatTensor()"]
    again = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nq\x00(h\x00ctorch\nTensor\n(h\x00" + (
        b"K\x01" * 3 + b"t}tR."
    )
    assert wanted_globals(again) == ["torch.Tensor()"]
    in_a_list = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n](ctorch\nLongTensor\nctorch\nTensor\nK\x09\x85}eR."
    assert wanted_globals(in_a_list) == ["torch.Tensor()"]


def test_tensors_with_attributes_name_their_class(tmp_path: Path) -> None:
    weight = torch.ones(3)
    weight.seen = 1  # type: ignore[attr-defined]
    torch.save({"weight": weight, "kind": torch.FloatTensor, "size": weight.shape}, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert wanted_globals(archive.read("m/data.pkl")) == []


def test_hook_of_a_plain_module(tmp_path: Path, marker: Path) -> None:
    model = nn.Linear(2, 2)
    model.forward = Command(marker)  # type: ignore[method-assign,assignment]
    torch.save(model, tmp_path / "m.pt")
    refused_here(tmp_path / "m.pt", r"wants posix\.system")


def test_command_in_the_example_inputs_of_a_pt2(tmp_path: Path, marker: Path, program: Path) -> None:
    evil = saved(((Command(marker),), {}))
    path = rewritten(
        program, tmp_path / "m.pt2", lambda name, data: evil if name.endswith("sample_inputs/model.pt") else data
    )
    refused(path, r"wants posix\.system")


@pytest.mark.parametrize("member", ["weights/model.pt", "constants/model.pt", "constants/opaque_obj_0", "extra/x"])
def test_members_that_no_table_names_are_not_read(tmp_path: Path, marker: Path, program: Path, member: str) -> None:
    path = rewritten(program, tmp_path / "m.pt2", lambda name, data: data)
    _add(path, f"data/{member}", pickle.dumps(Command(marker)))
    assert load(path).kind == "exported_program"


def _add(path: Path, member: str, data: bytes) -> Path:
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{member}", data)
    return path


@pytest.mark.parametrize(
    "entry",
    [
        {"path_name": "opaque_obj_/x"},
        {"path_name": "opaque_obj_0"},
        {"path_name": "custom_obj_0"},
        {"path_name": "../weights/weight_0"},
        {"path_name": "WEIGHT_0"},
        {"path_name": "weight_0/"},
        {"use_pickle": True},
        {"use_pickle": None},
        {"use_pickle": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("table", ["weights", "constants"])
def test_tables_of_tensors_name_tensors(
    tmp_path: Path, marker: Path, program: Path, table: str, entry: dict[str, Any]
) -> None:
    def edit(name: str, data: bytes) -> bytes:
        if not name.endswith(f"{table}/model_{table}_config.json"):
            return data
        config = json.loads(data)
        meta = {"dtype": 7, "sizes": [{"as_int": 1}], "requires_grad": False, "device": {"type": "cpu", "index": None}}
        meta |= {"strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}
        first = {"path_name": "tensor_0", "is_param": False, "use_pickle": False, "tensor_meta": meta}
        config["config"] = {"0.weight": {**first, **entry}, **config["config"]}
        return json.dumps(config).encode()

    path = rewritten(program, tmp_path / "m.pt2", edit)
    evil = pickle.dumps(Command(marker))
    for member in ("opaque_obj_/x", "opaque_obj_0", "custom_obj_0", "tensor_0", "WEIGHT_0"):
        _add(path, f"data/{table}/{member}", evil)
    if "path_name" in entry and entry["path_name"] in ("../weights/weight_0", "WEIGHT_0", "weight_0/"):
        refused_here(path, "is no tensor|members are called|that nobody should open")
    else:
        refused_here(path, "is pickled|is no tensor|members are called")


def test_a_second_entry_of_one_name_is_no_way_round(tmp_path: Path, marker: Path, program: Path) -> None:
    """Python's reader takes the last entry of a name; torch looked at each."""

    def edit(name: str, data: bytes) -> bytes:
        if not name.endswith("weights/model_weights_config.json"):
            return data
        hidden = data.replace(b'"use_pickle": false', b'"use_pickle": true', 1)
        first = hidden[hidden.index(b'"0.weight"') : hidden.index(b', "0.bias"')]
        return data.replace(b'{"config": {', b'{"config": {' + first + b", ")

    path = rewritten(program, tmp_path / "m.pt2", edit)
    assert load(path).kind == "exported_program"


NAMES = ["DATA/constants/x", "data/weights/WEIGHT_0", "data/weights/weight_0", "data\\x", "../x", "/x", "a//b", "é"]


@pytest.mark.parametrize("name", NAMES)
def test_archives_that_are_read_in_two_ways(tmp_path: Path, program: Path, name: str) -> None:
    path = rewritten(program, tmp_path / "m.pt2", lambda member, data: data)
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(name if name.startswith(("/", "..")) else f"{root}/{name}", b"x")
        if name == "DATA/constants/x":
            archive.writestr(f"{root}/data/constants/X", b"x")
            archive.writestr(f"{root}/data/constants/x", b"x")
    refused_here(path, "that nobody should open")


def test_a_link_in_an_archive(tmp_path: Path, program: Path) -> None:
    path = rewritten(program, tmp_path / "m.pt2", lambda member, data: data)
    link = zipfile.ZipInfo("program/data/weights/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    refused_here(path, "is a link")


def _size_text(description: dict[str, Any], code: str) -> None:
    values = description["graph_module"]["graph"]["tensor_values"]
    next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": code, "hint": None}}


def _guard(description: dict[str, Any], code: str) -> None:
    description["guards_code"] = [f"{code} == 0"]


def _operator(description: dict[str, Any], code: str) -> None:
    node = description["graph_module"]["graph"]["nodes"][0]
    node["target"] = "torch.os.system"
    node["inputs"] = [{"name": "", "arg": {"as_string": code}, "kind": 1}]


def _file_operator(description: dict[str, Any]) -> None:
    description["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.from_file.default"


def _library(description: dict[str, Any]) -> None:
    description["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.load_library"


def _tree(description: dict[str, Any]) -> None:
    context = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}
    tree = {"type": "collections.defaultdict", "context": context, "children_spec": []}
    description["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, tree])


def _enum_tree(description: dict[str, Any]) -> None:
    context = json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "y"}])
    tree = {"type": "builtins.dict", "context": context, "children_spec": []}
    description["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])


def _value_name(description: dict[str, Any], code: str) -> None:
    graph = description["graph_module"]["graph"]
    last = graph["nodes"][-1]
    last["outputs"] = [{"as_tensor": {"name": code}}]
    description["graph_module"]["signature"]["output_specs"][0] = {
        "user_output": {"arg": {"as_tensor": {"name": code}}}
    }


def _weight_argument(description: dict[str, Any], code: str) -> None:
    node = description["graph_module"]["graph"]["nodes"][0]
    node["inputs"][0] = {"name": "input", "arg": {"as_operator": code}, "kind": 1}


def _custom(description: dict[str, Any], code: str) -> None:
    specs = description["graph_module"]["signature"]["input_specs"]
    specs.append({"custom_obj": {"arg": {"name": "o", "class_fqn": code}, "custom_obj_name": code}})


def _range(description: dict[str, Any], code: str) -> None:
    description["range_constraints"][code] = {"min_val": 1, "max_val": 2}


ESCAPED = "1\\\n + __import__('os').system('touch {marker}') #"
COMMENTED = "x #\n__import__('os').system('touch {marker}')"


@pytest.mark.parametrize("attack", [_size_text, _guard, _range], ids=lambda attack: attack.__name__.strip("_"))
@pytest.mark.parametrize("code", [CODE, ESCAPED, COMMENTED], ids=["plain", "escaped", "commented"])
def test_expressions_of_a_pt2_are_not_read(
    tmp_path: Path, marker: Path, program: Path, attack: Callable[[dict[str, Any], str], None], code: str
) -> None:
    text = code.format(marker=marker)
    path = described(program, tmp_path / "m.pt2", lambda value: attack(value, text))
    loaded = load(path)
    x = torch.ones(3, 3)
    assert loaded.captured() is not None and loaded.module(x)[0].shape == (3, 2)


@pytest.mark.parametrize(
    "attack", [_operator, _value_name, _weight_argument, _custom], ids=lambda attack: attack.__name__.strip("_")
)
@pytest.mark.parametrize("code", [CODE, ESCAPED, COMMENTED], ids=["plain", "escaped", "commented"])
def test_code_in_the_graph_of_a_pt2(
    tmp_path: Path, marker: Path, program: Path, attack: Callable[[dict[str, Any], str], None], code: str
) -> None:
    text = code.format(marker=marker)
    path = described(program, tmp_path / "m.pt2", lambda value: attack(value, text))
    refused_here(path, "may be code|no exported program holds|cannot be read")


@pytest.mark.parametrize(
    "attack", [_file_operator, _library, _tree, _enum_tree], ids=lambda attack: attack.__name__.strip("_")
)
def test_a_graph_of_a_pt2_that_calls_what_it_should_not(
    tmp_path: Path, marker: Path, program: Path, attack: Callable[[dict[str, Any]], None]
) -> None:
    path = described(program, tmp_path / "m.pt2", attack)
    refused_here(path, "may be code|no exported program holds|cannot be read")


@pytest.mark.parametrize("held", [{}, {"name": 5}, {"name": ["x"]}], ids=str)
def test_a_fixed_input_of_a_pt2_has_a_name(tmp_path: Path, program: Path, held: dict[str, Any]) -> None:
    def edit(description: dict[str, Any]) -> None:
        description["graph_module"]["signature"]["input_specs"].append({"constant_input": held})

    refused_here(described(program, tmp_path / "m.pt2", edit), "no exported program holds: .* is no name")


def test_names_of_weights_in_a_pt2_become_identifiers(tmp_path: Path, marker: Path, program: Path) -> None:
    evil = f'0"); {CODE.format(marker=marker)} #'

    def edit(name: str, data: bytes) -> bytes:
        if name.endswith("weights_config.json"):
            config = json.loads(data)["config"]
            config[f"{evil}.weight"] = config.pop("0.weight")
            return json.dumps({"config": config}).encode()
        if name.endswith("models/model.json"):
            description = json.loads(data)
            for spec in description["graph_module"]["signature"]["input_specs"]:
                if spec.get("parameter", {}).get("parameter_name") == "0.weight":
                    spec["parameter"]["parameter_name"] = f"{evil}.weight"
            return json.dumps(description).encode()
        return data

    path = rewritten(program, tmp_path / "m.pt2", edit)
    loaded = load(path)
    assert "rewritten" in loaded.warnings[0]
    program_ = loaded.captured()
    assert program_ is not None and all(name.isidentifier() for name in program_.text().split(" = ")[0].split(":")[:1])


def test_the_attacks_are_real(tmp_path: Path, program: Path) -> None:
    """torch itself runs the code in a size, so the refusals above guard against something."""
    marker = tmp_path / "proof"
    path = described(program, tmp_path / "m.pt2", lambda value: _size_text(value, CODE.format(marker=marker)))
    with pytest.raises(Refused, match="torch cannot read"):
        load(path, trust=True)
    assert marker.exists()


def test_native_code_in_a_pt2(tmp_path: Path, program: Path) -> None:
    path = rewritten(program, tmp_path / "m.pt2", lambda name, data: data)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/data/aotinductor/model/model.so", b"\x7fELF")
    refused_here(path, "AOTInductor package: native code")


@pytest.mark.parametrize("zipped", [True, False])
def test_small_file_that_asks_for_gigabytes(tmp_path: Path, zipped: bool) -> None:
    torch.save({"a": Bomb()}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    assert (tmp_path / "m.pt").stat().st_size < 2000
    refused(tmp_path / "m.pt", "asks for more memory")


def test_zip_bomb(tmp_path: Path) -> None:
    """A storage that is 1000 times larger than its file."""
    torch.save({"a": torch.zeros(1)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as old, zipfile.ZipFile(tmp_path / "m.pt", "w") as new:
        for info in old.infolist():
            if not info.filename.endswith("data/0"):
                new.writestr(info.filename, old.read(info.filename))
                continue
            with new.open(zipfile.ZipInfo(info.filename), "w", force_zip64=True) as member:
                member._compressor = zipfile._get_compressor(zipfile.ZIP_DEFLATED, 1)
                member._zinfo.compress_type = zipfile.ZIP_DEFLATED
                for _ in range(80):
                    member.write(bytes(1 << 24))
    assert (tmp_path / "m.pt").stat().st_size < 20_000_000
    refused_here(tmp_path / "m.pt", "that nobody should open: its members have")


@pytest.mark.parametrize("kind", ["module", "parameter", "buffer"])
def test_names_in_a_module_become_identifiers(tmp_path: Path, marker: Path, kind: str) -> None:
    """torch.fx writes names of attributes into the source of a graph as they are."""
    evil = f'a"); {CODE.format(marker=marker)} #'
    module = nn.Sequential(nn.Linear(3, 3))
    if kind == "module":
        module._modules[evil] = nn.Linear(3, 3)
    elif kind == "parameter":
        linear = module[0]
        linear._parameters = {evil: nn.Parameter(torch.ones(1)), **linear._parameters}
    else:
        module[0].register_buffer("b", torch.ones(1))
        module[0]._buffers[evil] = module[0]._buffers.pop("b")
    torch.save(module, tmp_path / "m.pt")
    loaded = load(tmp_path / "m.pt")
    names = [name for child in loaded.module.modules() for held in (child._modules, child._parameters, child._buffers)
             for name in held]  # fmt: skip
    assert all(name.replace("_", "").isalnum() and name.isascii() for name in names)
    assert "rewritten" in loaded.warnings[0] and capture(loaded.module, torch.randn(2, 3)).check() is None


def test_modules_that_contain_each_other(tmp_path: Path) -> None:
    """2^30 walks through 30 modules, or one walk without an end."""
    top = nn.Sequential(nn.ReLU())
    for _ in range(30):
        top = nn.Sequential(top, top)
    torch.save(top, tmp_path / "tower.pt")
    assert (tmp_path / "tower.pt").stat().st_size < 30_000
    refused_here(tmp_path / "tower.pt", "contain each other")
    knot = nn.Sequential(nn.ReLU())
    knot._modules["knot"] = knot
    torch.save(knot, tmp_path / "knot.pt")
    refused_here(tmp_path / "knot.pt", "contain each other")


@pytest.mark.parametrize("keep", [0.3, 0.97])
def test_truncated_files(tmp_path: Path, program: Path, keep: float) -> None:
    legacy = io.BytesIO()
    torch.save(nn.Linear(64, 64), legacy, _use_new_zipfile_serialization=False)
    for data, match in (
        (program.read_bytes(), "cut off or damaged|cannot read"),
        (legacy.getvalue(), "cannot read|not opened"),
    ):
        (tmp_path / "m.pt").write_bytes(data[: int(len(data) * keep)])
        refused_here(tmp_path / "m.pt", match)


def test_safetensors_of_more_tensors_than_any_network(tmp_path: Path) -> None:
    """Three hundred thousand empty ones took a minute in the user's process."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"k{place}": empty for place in range((1 << 16) + 1)}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(Refused, match="65537 tensors, more than any network"):
        load_trusted(ModelSource.of(tmp_path / "m.safetensors", model="torch.nn:Identity"))


def test_safetensors_of_no_elements_and_an_endless_side(tmp_path: Path) -> None:
    header = json.dumps({"k": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(Refused, match="damaged safetensors file"):
        load_trusted(ModelSource.of(tmp_path / "m.safetensors", model="torch.nn:Identity"))
    with pytest.raises(Refused, match="cannot be read"):
        stored.load_left(tmp_path, "m.safetensors")
