"""Files that try to run a command, to eat the machine or to crash the process: refused, and nothing of it happens."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimize.errors import Refused
from optimize.load import guarded, load
from optimize.load.identify import Kind, identify
from optimize.load.untrusted import open_untrusted
from tests.load.files import Bomb, Command, described, rewritten, saved

CODE = "__import__('os').system('touch {marker}')"


@pytest.fixture
def marker(tmp_path: Path) -> Any:
    """A file that the attack would make; the test fails if it does."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists(), "code of the file was run"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "program.pt2"
    batch = torch.export.Dim("batch", min=1, max=64)
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    torch.export.save(torch.export.export(module, (torch.randn(2, 3),), dynamic_shapes=({0: batch},)), path)
    return path


def refused(path: Path, match: str) -> None:
    with pytest.raises(Refused, match=match):
        load(path)


def refused_here(path: Path, match: str) -> None:
    """Without the rehearsal, which runs the same checks in another process."""
    with pytest.raises(Refused, match=match):
        open_untrusted(path, identify(path), str(path))


def test_plain_pickle(tmp_path: Path, marker: Path) -> None:
    for protocol in (2, 4):
        (tmp_path / "m.pt").write_bytes(pickle.dumps(Command(marker), protocol))
        refused(tmp_path / "m.pt", "plain pickle")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_command_in_a_checkpoint(tmp_path: Path, marker: Path, zipped: bool, protocol: int) -> None:
    held = {"state_dict": nn.Linear(2, 2).state_dict(), "args": Command(marker)}
    torch.save(held, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    refused(tmp_path / "m.pt", r"wants posix\.system")


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


def test_hook_of_a_plain_module(tmp_path: Path, marker: Path) -> None:
    model = nn.Linear(2, 2)
    model.forward = Command(marker)  # type: ignore[method-assign,assignment]
    torch.save(model, tmp_path / "m.pt")
    refused_here(tmp_path / "m.pt", r"wants posix\.system")


@pytest.mark.parametrize("member", ["data/sample_inputs/model.pt", "data/weights/model.pt", "data/constants/model.pt"])
def test_command_in_a_pickle_of_a_pt2(tmp_path: Path, marker: Path, program: Path, member: str) -> None:
    path = rewritten(program, tmp_path / "m.pt2", lambda name, data: data)
    with zipfile.ZipFile(program) as archive:
        root = archive.namelist()[0].partition("/")[0]
    evil = saved(((Command(marker),), {}))
    if member.startswith("data/sample_inputs"):
        rewritten(program, path, lambda name, data: evil if name.endswith(member) else data)
    else:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(f"{root}/{member}", evil)
    refused(path, r"wants posix\.system")


def test_pickled_weight_and_opaque_object_of_a_pt2(tmp_path: Path, marker: Path, program: Path) -> None:
    def pickled(name: str, data: bytes) -> bytes:
        if name.endswith("weights/model_weights_config.json"):
            return data.replace(b'"use_pickle": false', b'"use_pickle": true')
        return saved(Command(marker)) if name.endswith("weights/weight_0") else data

    refused_here(rewritten(program, tmp_path / "a.pt2", pickled), r"wants posix\.system")

    def opaque(name: str, data: bytes) -> bytes:
        if name.endswith("constants/model_constants_config.json"):
            entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False, "tensor_meta": None}
            return json.dumps({"config": {"c": entry}}).encode()
        return data

    path = rewritten(program, tmp_path / "b.pt2", opaque)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/data/constants/opaque_obj_0", pickle.dumps(Command(marker)))
    refused_here(path, r"wants posix\.system")


def _size_text(description: dict[str, Any], code: str) -> None:
    values = description["graph_module"]["graph"]["tensor_values"]
    next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": code, "hint": None}}


def _guard(description: dict[str, Any], code: str) -> None:
    description["guards_code"] = [f"{code} == 0"]


def _operator(description: dict[str, Any], code: str) -> None:
    node = description["graph_module"]["graph"]["nodes"][0]
    node["target"] = "torch.os.system"
    node["inputs"] = [{"name": "", "arg": {"as_string": code}, "kind": 1}]


def _file_operator(description: dict[str, Any], code: str) -> None:
    description["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.from_file.default"


def _library(description: dict[str, Any], code: str) -> None:
    description["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.load_library"


def _tree(description: dict[str, Any], code: str) -> None:
    context = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}
    tree = {"type": "collections.defaultdict", "context": context, "children_spec": []}
    description["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, tree])


def _enum_tree(description: dict[str, Any], code: str) -> None:
    context = json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "y"}])
    tree = {"type": "builtins.dict", "context": context, "children_spec": []}
    description["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])


def _name(description: dict[str, Any], code: str) -> None:
    description["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [f"x={code}"]


def _range(description: dict[str, Any], code: str) -> None:
    description["range_constraints"][code] = {"min_val": 1, "max_val": 2}


@pytest.mark.parametrize(
    "attack",
    [_size_text, _guard, _operator, _file_operator, _library, _tree, _enum_tree, _name, _range],
    ids=lambda attack: attack.__name__.strip("_"),
)
def test_code_in_the_description_of_a_pt2(
    tmp_path: Path, marker: Path, program: Path, attack: Callable[[dict[str, Any], str], None]
) -> None:
    code = CODE.format(marker=marker)
    refused_here(
        described(program, tmp_path / "m.pt2", lambda value: attack(value, code)), "may run code of its author"
    )


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
    refused(path, "AOTInductor package: native code")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_that_writes_a_file(tmp_path: Path, marker: Path) -> None:
    class Writer(nn.Module):
        def __init__(self, target: str) -> None:
            super().__init__()
            self.target = target

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.save(x, self.target)
            return x

    torch.jit.script(Writer(str(marker))).save(tmp_path / "m.pt")
    refused(tmp_path / "m.pt", "mentions 'save'")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "call",
    [
        b"torch.save(x, 'MARKER')",
        b"torch . save(x, 'MARKER')",
        b"ops.aten.save(x, 'MARKER')",
        b'getattr(torch, "save")(x, "MARKER")',
        b'getattr(torch, "\\163ave")(x, "MARKER")',
        b'getattr(torch, "sa" "ve")(x, "MARKER")',
        b"getattr( torch, 'sa' 've')(x, 'MARKER')",
    ],
)
def test_spellings_of_a_torchscript_call(tmp_path: Path, marker: Path, call: bytes) -> None:
    torch.jit.script(nn.Sequential(nn.ReLU())).save(tmp_path / "good.pt")
    call = call.replace(b"MARKER", str(marker).encode())

    def edit(name: str, data: bytes) -> bytes:
        return data.replace(b"return ", call + b"\n    return ", 1) if name.endswith(".py") else data

    refused_here(rewritten(tmp_path / "good.pt", tmp_path / "m.pt", edit), "mentions '(save|getattr)'")


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
    refused(tmp_path / "m.pt", "asks for more memory|cannot read")


def test_endless_computation_is_stopped(tmp_path: Path, program: Path) -> None:
    path = described(program, tmp_path / "m.pt2", lambda value: _size_text(value, "9**9**9**9"))
    with pytest.raises(Refused, match="still not open after 4 s"):
        guarded.rehearse(path, Kind.EXPORTED, limit_s=4)


def test_native_crash_and_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_CHILD", "tests.load.fake_child")
    (tmp_path / "m.pt").write_text("abort")
    with pytest.raises(Refused, match=r"killed the process .* \(signal SIGABRT"):
        guarded.rehearse(tmp_path / "m.pt", Kind.CHECKPOINT)
    (tmp_path / "m.pt").write_text("spin")
    with pytest.raises(Refused, match="still not open after 0 s"):
        guarded.rehearse(tmp_path / "m.pt", Kind.CHECKPOINT, limit_s=0.2)


def test_child_inherits_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_CHILD", "tests.load.fake_child")
    monkeypatch.setenv("SOME_API_TOKEN", "secret")
    (tmp_path / "m.pt").write_text("environment")
    with pytest.raises(Refused, match="PATH") as caught:
        guarded.rehearse(tmp_path / "m.pt", Kind.CHECKPOINT)
    assert "SOME_API_TOKEN" not in caught.value.what


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
