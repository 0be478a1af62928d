"""Each kind of source, loaded and compared with what was saved."""

import hashlib
import importlib
import re
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from optimize.errors import Refused, UsageError
from optimize.load import Loaded, ModelSource, weights
from optimize.load.capturing import AS_USUAL
from optimize.load.opening import capture_source
from optimize.progress import silent
from tests.load.files import Command, Net, load, plain

NET = "tests.load.files:Net"
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def trained_net() -> Net:
    net = Net()
    net(torch.randn(4, 3, 8, 8))
    return net.eval()


@pytest.mark.parametrize("zipped", [True, False])
def test_whole_module_opens_without_trust(tmp_path: Path, zipped: bool) -> None:
    model, path = plain(), tmp_path / "any.name"
    torch.save(model, path, _use_new_zipfile_serialization=zipped)
    loaded = load(path)
    assert loaded.kind == "module" and loaded.exported is None and loaded.warnings == ()
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(loaded.module(X), model(X))


def test_training_flag_is_as_saved(tmp_path: Path) -> None:
    torch.save(plain().train(), tmp_path / "m.pt")
    assert load(tmp_path / "m.pt").module.training


def test_own_class_needs_trust_and_is_named(tmp_path: Path) -> None:
    net, path = trained_net(), tmp_path / "m.pt"
    torch.save(net, path)
    with pytest.raises(Refused, match=r"wants tests\.load\.files\.Net") as caught:
        load(path)
    assert "--trust" in caught.value.hint and "--model" in caught.value.hint
    assert torch.equal(load(path, trust=True).module(IMAGES), net(IMAGES))


def test_own_class_is_found_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed command does not look there by itself, as ``python -m`` does."""
    (tmp_path / "shelf_of_mine.py").write_text("from torch import nn\n\n\nclass Shelf(nn.Identity):\n    pass\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        torch.save(importlib.import_module("shelf_of_mine").Shelf(), tmp_path / "m.pt")
        del sys.modules["shelf_of_mine"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert type(load(tmp_path / "m.pt", trust=True).module).__name__ == "Shelf"


def test_own_class_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(trained_net(), tmp_path / "m.pt")
    monkeypatch.delattr("tests.load.files.Net")
    with pytest.raises(Refused, match="cannot be imported here"):
        load(tmp_path / "m.pt", trust=True)


@pytest.mark.parametrize(
    ("wrapper", "zipped"), [(None, True), (None, False), ("state_dict", True), ("model", False), ("ema", True)]
)
def test_state_dict(tmp_path: Path, zipped: bool, wrapper: str | None) -> None:
    net, path = trained_net(), tmp_path / "w.pth"
    held = {wrapper: net.state_dict(), "epoch": 3} if wrapper else net.state_dict()
    torch.save(held, path, _use_new_zipfile_serialization=zipped)
    loaded = load(path, model=NET)
    assert loaded.kind == "state_dict" and not loaded.module.training
    assert torch.equal(loaded.module(IMAGES), net(IMAGES))
    assert any("epoch" in warning for warning in loaded.warnings) == bool(wrapper)


def test_prefix_of_data_parallel_is_cut_and_said(tmp_path: Path) -> None:
    net = trained_net()
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "w.pt")
    net.cpu()  # it moves what it is given to a GPU
    loaded = load(tmp_path / "w.pt", model=NET)
    assert torch.equal(loaded.module(IMAGES), net(IMAGES))
    assert len(loaded.warnings) == 1 and "module." in loaded.warnings[0]


@pytest.mark.parametrize(
    "prefix", ["model._orig_mod.", "_orig_mod.module.", "module.module.", "model.module._orig_mod."]
)
def test_prefixes_are_cut_in_the_order_they_were_put_on(prefix: str, tmp_path: Path) -> None:
    net = trained_net()
    state = {f"{prefix}{name}": value for name, value in net.state_dict().items()}
    torch.save({"n_averaged": torch.tensor(3), **state}, tmp_path / "w.pt")
    loaded = load(tmp_path / "w.pt", model=NET)
    assert torch.equal(loaded.module(IMAGES), net(IMAGES))


def test_half_precision_weights_are_said_to_be_converted(tmp_path: Path) -> None:
    torch.save(trained_net().half().state_dict(), tmp_path / "w.pt")
    loaded = load(tmp_path / "w.pt", model=NET)
    assert loaded.warnings == ("Weights were converted from torch.float16 to torch.float32.",)
    assert loaded.module.conv.weight.dtype == torch.float32


def test_missing_batch_counts_are_no_difference(tmp_path: Path) -> None:
    net = trained_net()
    torch.save({key: value for key, value in net.state_dict().items() if "num_batches" not in key}, tmp_path / "w.pt")
    assert torch.equal(load(tmp_path / "w.pt", model=NET).module(IMAGES), net(IMAGES))


def test_safetensors(tmp_path: Path) -> None:
    net, path = trained_net(), tmp_path / "w.bin"
    safetensors.torch.save_file(net.state_dict(), path)
    assert torch.equal(load(path, model=NET).module(IMAGES), net(IMAGES))
    with pytest.raises(Refused, match=r"state dict: 6 tensors \(\w+\.\w+, "):
        load(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Refused, match="damaged safetensors"):
        load(path, model=NET)


def test_exported_program_with_guards_and_symbols(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            if x.shape[0] % 4 == 0 and x.shape[0] > 2 * extra["k"].shape[1]:
                return {"sum": torch.einsum("ij,ij->i", x, x), "k": extra["k"].reshape(-1) // 2}
            return {"sum": x, "k": x}

    inputs = (torch.arange(24.0).reshape(8, 3), {"k": torch.ones(2, 3)})
    auto = torch.export.Dim.AUTO
    program = torch.export.export(Pair(), inputs, dynamic_shapes={"x": {0: auto}, "extra": {"k": {1: auto}}})
    torch.export.save(program, tmp_path / "p.pt2")
    loaded = load(tmp_path / "p.pt2")
    assert loaded.kind == "exported_program" and loaded.exported is not None
    x, k = torch.randn(12, 3), torch.randn(2, 4)
    expected, found = Pair()(x, {"k": k}), loaded.module(x, k)
    assert all(torch.equal(expected[key], value) for key, value in zip(("sum", "k"), found, strict=True))
    program = loaded.captured()
    assert program is not None and program(*inputs).keys() == {"sum", "k"}


@pytest.mark.parametrize("trust", [False, True])
def test_exported_convolution_under_another_name(tmp_path: Path, trust: bool) -> None:
    net, path = trained_net(), tmp_path / "network.bin"
    batch, half = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("half", min=2, max=64)
    program = torch.export.export(net, (IMAGES,), dynamic_shapes=({0: batch, 2: 2 * half},))
    torch.export.save(program, tmp_path / "p.pt2")
    (tmp_path / "p.pt2").rename(path)
    found = load(path, trust=trust).module(torch.cat([IMAGES, IMAGES[:1]]))
    found = found if trust else found[0]
    torch.testing.assert_close(found, net(torch.cat([IMAGES, IMAGES[:1]])))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_and_traced_containers_open_without_trust(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.ModuleDict({"a-b": nn.ReLU()})["a-b"]).eval()
    for scripted in (
        torch.jit.script(model),
        torch.jit.trace(model, IMAGES),
        torch.jit.freeze(torch.jit.script(model)),
    ):
        scripted.save(tmp_path / "s.pt")
        torch.testing.assert_close(load(tmp_path / "s.pt").module(IMAGES), model(IMAGES))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("trust", [False, True])
def test_torchscript(tmp_path: Path, trust: bool) -> None:
    net = trained_net()
    torch.jit.script(net).save(tmp_path / "s.pt")
    loaded = load(tmp_path / "s.pt", trust=trust)
    assert loaded.kind == "torchscript" and torch.equal(loaded.module(IMAGES), net(IMAGES))


@pytest.mark.parametrize("name", ["onnx.py", "openvino/__init__.py"])
def test_a_file_that_hides_a_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = name.removesuffix(".py").partition("/")[0]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(Refused, match=f"'./{re.escape(name)}' hides the package '{package}'"):
        load("nets:net")


def test_factory_class_function_and_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Net", "NET_OBJECT", "plain"):
        loaded = load(f"tests.load.files:{name}")
        assert loaded.kind == "factory" and loaded.sha256 is None and not loaded.module.training
    (tmp_path / "nets_of_mine.py").write_text("import torch\nclass Group:\n    make = torch.nn.Identity\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    assert isinstance(load("nets_of_mine:Group.make"), Loaded)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("no/such/file.pt", "no file 'no/such/file.pt'"),
        ("C:/models/a.pt", "no file"),
        ("no_such_package.nets:Net", "no module 'no_such_package'"),
        ("tests.load.no_such_module:Net", r"no module 'tests\.load\.no_such_module'"),
        ("tests.load.files:Nett", "there is no 'Nett'"),
        ("tests.load.files:raising", "raised ValueError: no weights today"),
        ("tests.load.files:text", "returned a str"),
        ("tests.load.files:NUMBER", "is of type int and cannot be called"),
    ],
)
def test_sources_that_are_refused(source: str, match: str) -> None:
    with pytest.raises(Refused, match=match):
        load(source)


def test_nearest_name_and_failing_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused) as caught:
        load("tests.load.files:Nett")
    assert "'Net'" in caught.value.hint
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "makes.py").write_text("def net():\n    import needs_more\n\n\ndef two(a): ...\n")
    for source in ("needs_more:Net", "makes:net"):
        with pytest.raises(
            Refused, match=r"No module named 'no_such_dependency', in .*needs_more\.py, line 1\."
        ) as caught:
            load(source)
        assert caught.value.hint == "Install 'no_such_dependency', or mend that import."
    late = "try:\n    {}\nexcept Exception as error:\n    raise ModuleNotFoundError('Could not import') from error\n"
    for cause, advice in (
        ("1 / 0", "Mend that import."),
        ("import no_such_dependency", "Install 'no_such_dependency'"),
    ):
        (tmp_path / f"late{len(cause)}.py").write_text(late.format(cause))
        with pytest.raises(Refused, match=rf"raised (Zero|Module).*, in .*late{len(cause)}\.py, line 2\.\n{advice}"):
            load(f"late{len(cause)}:net")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/breaks.py").write_text("raise ImportError('no operator')\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    (tmp_path / "asks.py").write_text("\n\nimport breaks\n")
    with pytest.raises(Refused, match=r"no operator, in .*asks\.py, line 3 through .*breaks\.py, line 1\."):
        load("asks:net")
    with pytest.raises(Refused, match=r"'makes:two' raised TypeError: .* 'a'\.\nIt is called without arguments"):
        load("makes:two")
    with pytest.raises(Refused, match="raised SystemExit: 0"):
        load("leaves:Net")
    (tmp_path / "says_nothing.py").write_text("raise ImportError\n")
    with pytest.raises(Refused, match=r"raised ImportError, in .*says_nothing\.py, line 1\.\nMend that import\."):
        load("says_nothing:Net")
    (tmp_path / "inside.py").write_text("from . import nets\n")
    with pytest.raises(Refused, match="no known parent package\\.") as caught:
        load("inside:Net")
    assert "package.inside:name" in caught.value.hint


def test_a_class_that_a_package_has_in_a_module_is_told_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module is imported for that: these two would raise."""
    package = tmp_path / "empty_package"
    package.mkdir()
    (package / "__init__.py").write_text("Shelf = None\n")
    (package / "net.py").write_text("1 / 0\nclass Net: ...\nsmall = Net\n")
    (package / "odd.py").write_bytes(b"\xff\xfe = Nets(Net)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    for name, advice in (
        ("Net", "Name the module that defines it: empty_package.net:Net."),
        ("small", "Name the module that defines it: empty_package.net:small."),
        ("Nets", "'empty_package' has the modules net, odd. Known: Shelf."),
    ):
        with pytest.raises(Refused, match=f"there is no '{name}'") as caught:
            load(f"empty_package:{name}")
        assert caught.value.hint == advice


def test_model_option(tmp_path: Path) -> None:
    for wrong in ("Net", "tests/load/files.py:Net", "a:b:c", ":Net"):
        with pytest.raises(UsageError, match="does not name a factory"):
            load(tmp_path / "w.pt", model=wrong)
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "w.pt", model="tests/load/files.py:Net")
    assert caught.value.hint == "Write tests.load.files:Net."
    with pytest.raises(UsageError, match="does not name a factory") as caught:
        load(tmp_path / "w.pt", model="tests.load.files:Net(6)")
    assert caught.value.hint.startswith("It is called without arguments; wrap it")
    with pytest.raises(UsageError, match="factory already"):
        load(NET, model=NET)
    torch.save(plain(), tmp_path / "m.pt")
    assert "not needed" in load(tmp_path / "m.pt", model=NET).warnings[0]


def test_keys_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    state = trained_net().state_dict()
    state["conv.weight"] = torch.zeros(4, 3, 5, 5)
    state["head.weight"] = state.pop("norm.weight")
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(Refused, match="does not fit Net") as caught:
        load(tmp_path / "w.pt", model=NET)
    assert "1 missing: norm.weight" in caught.value.what
    assert "1 unexpected: head.weight" in caught.value.what
    assert "conv.weight is [4, 3, 5, 5] and should be [4, 3, 3, 3]" in caught.value.what


def test_a_tensor_where_a_module_keeps_something_else() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> object:
            return {"calls": 1}

    net = Counting(2, 2)
    with pytest.raises(Refused, match=r"_extra_state is \[3\] and should be no tensor"):
        weights.fit(net, {**net.state_dict(), "_extra_state": torch.ones(3)}, "w.pt")


@pytest.mark.parametrize(
    ("held", "match"),
    [
        (torch.zeros(2, 3), r"one tensor of shape \(2, 3\)"),
        ([1, 2], "holds a list"),
        ({}, "an empty dict"),
        ({"epoch": 3, "loss": 0.5}, "keys 'epoch', 'loss'"),
    ],
)
def test_checkpoints_without_a_model(tmp_path: Path, held: object, match: str) -> None:
    torch.save(held, tmp_path / "w.pt")
    with pytest.raises(Refused, match=match):
        load(tmp_path / "w.pt")


def test_module_inside_a_checkpoint(tmp_path: Path) -> None:
    model = plain()
    torch.save({"epoch": 1, "model": model}, tmp_path / "w.pt")
    loaded = load(tmp_path / "w.pt")
    assert loaded.kind == "module" and "Took 'model'" in loaded.warnings[0]
    assert torch.equal(loaded.module(X), model(X))


def test_trust_runs_the_code_of_the_file(tmp_path: Path) -> None:
    torch.save({"model": plain(), "extra": Command(tmp_path / "marker")}, tmp_path / "w.pt")
    assert load(tmp_path / "w.pt", trust=True).kind == "module"
    assert (tmp_path / "marker").exists()


def test_an_exported_program_that_returns_none_beside_its_tensors_returns_those(tmp_path: Path) -> None:
    class Cached(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"cache": None, "sum": x.sum(1), "pair": (None, x * 2)}

    torch.export.save(torch.export.export(Cached().eval(), (X,)), tmp_path / "net.pt2")
    for trust in (False, True):
        held = capture_source(
            ModelSource.of(tmp_path / "net.pt2"), lambda _: (), AS_USUAL, trust=trust, progress=silent
        )
        found = held.program(X)
        assert torch.equal(found["sum"], X.sum(1)) and torch.equal(found["pair"][0], X * 2)
        told = "Left out of the outputs, which are tensors in a file: 'cache' (None), 'pair.0' (None)."
        assert told in (*held.warnings, *held.program.notes)


def test_an_exported_program_with_arguments_that_are_no_tensors_is_as_it_was_exported(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, mask: object, flag: bool, y: torch.Tensor, *, by: float = 1.0) -> object:
            return x * by + y if flag and mask is None else x

    exported = torch.export.export(Scaled().eval(), (X, None, True, X + 1), {"by": 3.0})
    torch.export.save(exported, tmp_path / "net.pt2")
    for trust in (False, True):
        held = capture_source(
            ModelSource.of(tmp_path / "net.pt2"), lambda _: (), AS_USUAL, trust=trust, progress=silent
        )
        assert torch.equal(held.program(X, X + 1), X * 3 + (X + 1))
        told = "Arguments that are no tensors are as they were exported: 'mask', 'flag', 'by'."
        assert told in (*held.warnings, *held.program.notes)
