"""What a run decided stands in its recipe, and the recipe makes the same files again."""

import json
import shlex
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import optimize
from optimize.errors import UsageError
from optimize.job import Job
from optimize.recipe import PassEntry, parse, read
from optimize.replay import written
from optimize.search import as_decided
from tests.quantization.test_sensitivity import fragile, images

Typed = Callable[..., subprocess.CompletedProcess[str]]
MODEL = "tests.quantization.test_sensitivity:fragile"
#: Whose files are the same whatever their process did before.
TARGETS = "onnx,openvino"
#: Decibels that only the fragile layer misses: about 57 with it in INT8, 75 and more without.
BOUND = 66


def digests(folder: Path) -> dict[str, str]:
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    return {name: digest for name, digest in found.items() if name.endswith((".onnx", ".xml", ".bin"))}


def floats(folder: Path) -> dict[str, list[str]]:
    rows = json.loads((folder / "report.json").read_text())["rows"]
    coverages = {f"{row['target']} {row['precision']}": row["coverage"] for row in rows if row["coverage"]}
    return {name: [layer["reason"] for layer in coverage["left_float"]] for name, coverage in coverages.items()}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, typed: Typed) -> Path:
    """A run whose fragile layer goes back to float, and in which a module is kept."""
    folder = tmp_path_factory.mktemp("replay")
    np.save(folder / "data.npy", images(64).numpy())
    asked = f"--int8 --calib {folder / 'data.npy'} --keep last --min-sqnr {BOUND} --no-layer-timing --to {TARGETS}"
    words = f"{MODEL} --input-shape 3,12,12 {asked} -q --out {folder / 'a'}"
    done = typed(*words.split())
    assert done.returncode == 0, done.stderr
    return folder / "a"


def test_the_recipe_holds_what_was_asked_and_what_was_decided(first: Path) -> None:
    recipe = read(first / "recipe.yaml")
    assert recipe.keep == ("last",) and recipe.min_sqnr == BOUND and recipe.input_shape == "3,12,12"
    assert recipe.decided.keys() == {"onnx int8", "openvino int8"}
    for row, layers in recipe.decided.items():
        assert "fragile" in layers and set(layers.values()) <= set(floats(first)[row])
    assert all("you keep 'last' in float" in reasons for reasons in floats(first).values())


def test_it_makes_the_same_files_again_by_the_command_it_names(first: Path, typed: Typed) -> None:
    before, reasons = digests(first), floats(first)
    assert len(before) == 6
    (command,) = [line for line in (first / "recipe.yaml").read_text().splitlines() if line.startswith("# optimize ")]
    done = typed(*shlex.split(command)[2:], "-q")
    assert done.returncode == 0, done.stderr
    assert digests(first) == before and floats(first) == reasons
    assert read(first / "recipe.yaml").decided.keys() == reasons.keys()


def test_what_was_decided_for_another_bound_is_decided_anew(first: Path, tmp_path: Path, typed: Typed) -> None:
    words = (MODEL, "--recipe", first / "recipe.yaml", "--min-sqnr", 1, "--no-layer-timing", "--out", tmp_path / "b")
    assert typed(*words, "-q").returncode == 0
    assert read(tmp_path / "b" / "recipe.yaml").decided == {"onnx int8": {}, "openvino int8": {}}


def test_a_layer_that_is_not_there_is_refused(first: Path, tmp_path: Path, typed: Typed) -> None:
    content = yaml.safe_load((first / "recipe.yaml").read_text())
    content["decided"] = {"onnx int8": {"fragil": "it was"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    done = typed(MODEL, "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path / "b", "-q")
    assert done.returncode == 2 and "no such layer in INT8" in done.stderr and "Did you mean 'fragile'?" in done.stderr
    assert not (tmp_path / "b").exists()
    program, _ = optimize.QuantizeStatic(calibration=[images(16)]).apply(optimize.capture(fragile(), (images(2),)))
    assert as_decided(program, {}) is program
    with pytest.raises(UsageError, match="no such layer"):
        as_decided(program, {"nowhere": "never"})
    with pytest.raises(UsageError, match="no such layer in INT8"):
        as_decided(optimize.capture(fragile(), (images(2),)), {"fragile": "a float file has none"})


def test_nothing_that_is_read_or_somebody_elses_is_written_over(tmp_path: Path, typed: Typed) -> None:
    model = tmp_path / "net.float32.onnx"
    optimize.export(optimize.capture(fragile(), (images(2),)), "onnx", model)
    (tmp_path / "mine").mkdir()
    own = tmp_path / "mine" / "recipe.yaml"
    own.write_text("# of my own\npasses: [FuseConvBN]\ntargets: [onnx]\n")
    held = model.read_bytes(), own.read_bytes()
    bracketed, link = tmp_path / "net[1].float32.onnx", tmp_path / "mine" / "net.float32.onnx"
    bracketed.write_bytes(held[0])
    link.symlink_to(model)
    lies = "lies in --out, where a file may get its name"
    for words, told in (
        ((model, "--fuse", "--to", "onnx", "--out", tmp_path), lies),
        ((bracketed, "--fuse", "--to", "onnx", "--out", tmp_path), lies),
        ((link, "--fuse", "--to", "onnx", "--out", tmp_path), lies),
        ((model, "--recipe", own, "--out", own.parent), "is of no run, and would be written over"),
    ):
        done = typed(*words, "-q")
        assert done.returncode == 1 and told in done.stderr and "Choose another --out" in done.stderr, done.stderr
    assert (model.read_bytes(), own.read_bytes()) == held and len(list(tmp_path.iterdir())) == 3
    assert typed(model, "--recipe", own, "--out", tmp_path, "--to", "torchscript", "-q").returncode == 0


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.json", "net.float32.xml", "net.float32.bin"])
def test_a_folder_of_somebody_else_keeps_what_a_run_would_write_over(name: str, tmp_path: Path, typed: Typed) -> None:
    (held := tmp_path / name).write_text("years of work")
    (source := tmp_path / "net.pt").touch()
    done = typed(source, "--input-shape", "3,8,8", "--fuse", "--to", "openvino", "--out", tmp_path, "-q")
    assert done.returncode == 1 and f"{name}' is of no run, and would be written over" in done.stderr, done.stderr
    assert held.read_text() == "years of work"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep", "head", "--fuse"), "no pass quantizes or casts"),
        (("--keep", "head"), "no pass quantizes or casts"),
        (("--keep", "fragil", "--int8"), "Did you mean 'fragile'?"),
    ],
)
def test_a_keep_that_keeps_nothing_is_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, typed: Typed
) -> None:
    done = typed(MODEL, "--input-shape", "3,12,12", *words, "--to", "onnx", "--out", tmp_path / "a", "-q")
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "a").exists()


def test_words_may_be_text_or_a_list() -> None:
    passes = [{"QuantizeStatic": {"keep": "head, stem"}}]
    (entry,) = parse({"passes": passes, "keep": "stem,gate"}).passes
    assert entry.build([torch.zeros(1)], ("stem", "gate")).keep == ("head", "stem", "gate")
    assert parse({"passes": passes, "keep": ["a", "b"]}).keep == parse({"passes": passes, "keep": "a,b"}).keep
    assert parse({"mean": [0.5, 0.5], "std": 0.25}).preprocessing == {"mean": "0.5,0.5", "std": "0.25"}


def test_python_passes_are_written_with_their_options(tmp_path: Path) -> None:
    passes = [optimize.FuseConvBN(), optimize.QuantizeStatic(calibration=[images(16)], calibrator="mse", keep="last")]
    optimize.optimize(fragile(), (images(2),), passes=passes, layer_timing=False, out=tmp_path)
    text = (tmp_path / "recipe.yaml").read_text()
    assert "# Its calibration data came from Python code" in text
    assert parse(yaml.safe_load(text)).passes == (
        PassEntry(name="FuseConvBN"),
        PassEntry(name="QuantizeStatic", options={"calibrator": "mse", "keep": ["last"]}),
    )


@pytest.mark.parametrize("end", ["\n", "\r", "\u0085", "\u2028", "\u2029"])
def test_the_name_of_a_model_is_no_key_of_its_recipe(end: str) -> None:
    """YAML ends a line at each of these, and what stands behind would be in force."""
    recipe = parse({"targets": ["onnx"]})
    text = written(Job(source=f"m{end}metric: top5{end}#.pt", recipe=recipe, out=Path("out")), recipe)
    assert parse(yaml.safe_load(text)) == recipe and "metric: top5" in text
