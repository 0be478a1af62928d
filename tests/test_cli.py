"""The command as a user types it: every kind of end in a process of its own, more words of that kind in this one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.slow import but_slowly

ROOT = Path(__file__).parents[1]
Typed = Callable[..., subprocess.CompletedProcess[str]]
CHECKPOINT = ROOT / "models" / "fashion_repvgg.pt"
FACTORY = ("--model", "models.repvgg:fashion_repvgg")
NET = ("tests.test_cli:net", "--input-shape", "3,16,16")


def command(*words: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    words = [sys.executable, "-m", "optimize", *map(str, words)]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)


def net() -> nn.Module:
    """Return what ``small`` holds as a file, for a command line that is about something else than opening files."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ).eval()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole-module file of torch's own classes and data for it."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    torch.save(net(), folder / "net.pt")
    images = torch.rand(40, 3, 16, 16)
    with torch.no_grad():
        labels = net()(images).argmax(1)
    np.savez(folder / "data.npz", x=images.numpy(), y=labels.numpy())
    return folder


def test_modules_of_the_current_folder_are_found_where_they_are_named_alone(tmp_path: Path) -> None:
    """A ``click.py`` beside the model was run in place of the package, before anything was confined."""
    for name in ("click", "yaml", "here"):
        (tmp_path / f"{name}.py").write_text(f"print('code of {name}')\nnet = 3\n")
    done = command("run", "here:net", "--to", "onnx", "--input-shape", "3", cwd=tmp_path)
    assert done.stdout == "code of here\n" and "'here:net' is of type int and cannot be called" in done.stderr


def test_the_line_of_the_design_card_works_as_written(small: Path, tmp_path: Path, typed: Typed) -> None:
    """``--fuse --int8 --to tensorrt`` with nothing else but the shape: INT8 calibrates on synthesised inputs."""
    done = typed(small / "net.pt", "--fuse", "--int8", "--to", "tensorrt", "--input-shape", "3,16,16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "optimized" / "report.json").read_text())
    assert report["calibration"]["synthetic"] is True
    assert all(row["accuracy"] is None for row in report["rows"])
    assert any("Accuracy was not measured" in warning for warning in report["warnings"])
    for row in report["rows"]:
        assert row["status"] == "not_run" and row["reason"].startswith("not run: no GPU")
        assert row["latency"] is None and row["size_bytes"] > 0
    assert "not run: no GPU" in done.stdout


def test_several_targets_data_and_report(small: Path, tmp_path: Path, typed: Typed) -> None:
    data, out = small / "data.npz", tmp_path / "out"
    given = ("--calib", data, "--eval", data, "--no-layer-timing")
    done = typed(small / "net.pt", "--fuse", "--int8", "--to", "torchscript,onnx", *given, "--out", out)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    assert [(row["target"], row["precision"]) for row in report["rows"]] == [
        ("torchscript", "float32"),
        ("torchscript", "int8"),
        ("onnx", "float32"),
        ("onnx", "int8"),
    ]
    for row in report["rows"]:
        assert row["status"] == "measured"
        assert Path(row["path"]).stat().st_size == row["size_bytes"]
        assert row["latency"]["median_s"] > 0 and row["latency"]["threads"] == 1
        assert row["accuracy"]["samples"] == 40 and row["accuracy"]["baseline"] == 1.0
        assert row["agreement"]["sqnr_db"] > 25
        assert any("right on every x86" in note for note in row["notes"]) is (row["precision"] == "int8")
    assert [step["pass"] for step in report["trace"]] == [
        "FuseBNSign",
        "Reparameterize",
        "FuseConvBN",
        "SelectEarly",
        "EqualizeChannels",
        "SmoothActivations",
        "PairChannels",
        "QuantizeStatic",
    ]
    listed = {path.name for path in out.iterdir()}
    assert {"report.json", "report.md", "report.html", "recipe.yaml"} < listed and len(listed) == 8
    assert str(out / "report.html") in done.stdout.replace("\n", "")


def test_a_recipe_does_what_the_flags_do(tmp_path: Path, typed: Typed) -> None:
    recipe = ROOT / "recipes" / "fold-only.yaml"
    done = typed("--recipe", recipe, *NET, "--out", tmp_path / "out", "--to", "torchscript")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [step["pass"] for step in report["trace"]] == ["Reparameterize", "FuseConvBN", "SelectEarly", "Script"]
    assert [row["target"] for row in report["rows"]] == ["torchscript"]


BAD = {
    "missing": (("nowhere.pt",), 1, "nowhere.pt"),
    "state dict without a factory": ((CHECKPOINT,), 1, "--model"),
    "unknown target": ((CHECKPOINT, *FACTORY, "--to", "tensort"), 2, "Did you mean 'tensorrt'"),
    "no target": ((CHECKPOINT, *FACTORY, "--to", ","), 2, "No target"),
    "wrong factory": ((CHECKPOINT, "--model", "models.repvgg:fashion_repvg"), 1, "fashion_repvgg"),
    "keys that do not fit": ((CHECKPOINT, "--model", "models.resnet:resnet_tiny"), 1, "stem"),
    "no shape": (("tests.nets:Transposed",), 2, "--input-shape"),
    "wrong shape": ((CHECKPOINT, *FACTORY, "--input-shape", "3,28,28"), 1, "channels"),
    "not a shape": ((CHECKPOINT, *FACTORY, "--input-shape", "1,x"), 2, "is not a shape"),
    "flags beside a recipe": (
        (CHECKPOINT, *FACTORY, "--recipe", ROOT / "recipes/fold-only.yaml", "--int8"),
        2,
        "recipe",
    ),
    "unknown option": ((CHECKPOINT, "--fuze"), 2, "--fuze"),
    "misspelt command": (("profle", CHECKPOINT), 2, "Did you mean 'profile'?"),
}
#: One of each exit code has a process of its own.
OWN_PROCESS = ("missing", "unknown target")


@pytest.mark.parametrize(
    "words",
    but_slowly([("show",), ("profile", "-q"), ("advise", "--no-try", "-q")], {("profile", "-q")}),
    ids=lambda words: words[0],
)
def test_what_was_guessed_of_the_input_is_said(words: tuple[str, ...], tmp_path: Path, typed: Typed) -> None:
    torch.save(torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.ReLU()), tmp_path / "net.pt")
    done = typed(words[0], tmp_path / "net.pt", *words[1:])
    assert done.returncode == 0, done.stderr
    assert "optimize: Nothing said what the model takes: 7 was guessed" in done.stderr


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_paragraph_and_leaves_nothing(name: str, tmp_path: Path, typed: Typed) -> None:
    words, code, message = BAD[name]
    words = words if "--to" in words or "--recipe" in words else (*words, "--to", "onnx")
    done = (command if name in OWN_PROCESS else typed)(*words, "--out", tmp_path / "out")
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 12
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kind, message", [("shape", "NHWC"), ("nan", "NaN"), ("empty", "no samples"), ("missing", "none.npz")]
)
def test_bad_calibration_data(kind: str, message: str, tmp_path: Path, typed: Typed) -> None:
    images = np.random.default_rng(0).random((8, 3, 16, 16), dtype=np.float32)
    broken = {"shape": images.transpose(0, 2, 3, 1), "nan": np.where(images > 0.9, np.nan, images), "empty": images[:0]}
    path = tmp_path / "none.npz"
    if kind in broken:
        path = tmp_path / "data.npz"
        np.savez(path, x=broken[kind])
    done = typed(*NET, "--int8", "--to", "onnx", "--calib", path, "--out", tmp_path / "out")
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_said(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "file").write_text("")
    done = typed(*NET, "--fuse", "--to", "onnx", "--out", tmp_path / "file" / "out")
    assert done.returncode == 1 and "cannot be written" in done.stderr and "Traceback" not in done.stderr


def test_a_full_disk_is_said_and_nothing_is_left(small: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes every write past its size fail, as a full disk does."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        "from optimize.cli import main; sys.argv = ['optimize', *sys.argv[1:]]; main()"
    )
    words = [small / "net.pt", "--fuse", "--to", "torchscript", "--input-shape", "3,16,16", "--out", tmp_path / "out"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script, *map(str, words)], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("library", "told"), [(True, ["imported", "interrupted"]), (False, ["interrupted"])])
def test_an_interrupt_waits_until_the_import_of_a_library_is_over(
    library: bool, told: list[str], tmp_path: Path
) -> None:
    """A module of the user's own may work as long as it likes, and is Python."""
    (tmp_path / "native.py").write_text("import signal; signal.raise_signal(signal.SIGINT); print('imported')")
    code = f"""
import signal, time
from optimize.cli import interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt._LIBRARIES += ({str(tmp_path)!r},) * {library}
interrupt.install()
try:
    import native
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == told


def test_an_import_without_end_is_interrupted_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("while True: pass")
    code = f"""
import os, signal, threading, time
from optimize.cli import interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt._LIBRARIES += ({str(tmp_path)!r},)
interrupt._PATIENCE_S = 0.5
interrupt.install()
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    import endless
except KeyboardInterrupt:
    print("interrupted")
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert found.stdout.split() == ["interrupted"], found.stderr


def test_an_interrupt_while_an_object_dies_is_not_lost() -> None:
    code = """
import signal, time
from optimize.cli import interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt.install()
class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
try:
    Dying()
    print("went on")
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:2] == ["went on", "interrupted"] and not found.stderr


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_an_interrupt_leaves_nothing(name: str, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("--fuse", "--to", "onnx", "--input-shape", "3,16,16", "--out", out)
    words = [sys.executable, "-m", "optimize", small / "net.pt", *asked]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(list(map(str, words)), env=env, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any(tmp_path.glob(".out.*/foreign/*")):
        time.sleep(0.02)
    process.send_signal(getattr(signal, name))
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130 and "Interrupted" in stderr and "Traceback" not in stderr, stderr
    assert not any(tmp_path.iterdir())


def test_half_on_the_command_line(small: Path, tmp_path: Path, typed: Typed) -> None:
    """Policy and types of inputs of --fp16, --bf16 and --mixed; INT8 mixed with half as a file of its own."""
    words = (*NET, "--calib", small / "data.npz", "--fuse", "--to", "onnx", "--out", tmp_path)
    asked = ("--int8", "--mixed", "float16", "--fp16", "--half-policy", "O2", "--half-io", "--no-layer-timing")
    done = typed(*words, *asked, "--quiet")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["precision"] for row in report["rows"]] == ["float32", "int8", "float16", "int8-float16"]
    assert [row["status"] for row in report["rows"]] == ["measured"] * 4
    casts = [step for step in report["trace"] if step["pass"] == "CastFP16"]
    assert [step["options"] for step in casts] == [
        "policy='O2', io='half', rounding='compensated', mixed=False",
        "policy='O2', io='half', rounding='compensated', mixed=True",
    ]
    assert "mixed: true" in report["recipe"] and "policy: O2" in report["recipe"]


@pytest.mark.parametrize(
    "words, message",
    [
        (("--half-policy", "O1"), "say how to cast"),
        (("--half-io", "--int8"), "say how to cast"),
        (("--mixed", "float16"), "needs static INT8"),
        (("--mixed", "bfloat16", "--int8=dynamic"), "needs static INT8"),
        (("--fp16", "--half-policy", "O9"), "O9"),
    ],
)
def test_half_options_that_fit_nothing(words: tuple[str, ...], message: str, tmp_path: Path, typed: Typed) -> None:
    done = typed(*NET, *words, "--to", "onnx", "--out", tmp_path / "out")
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "out").exists()


def test_height_and_width_are_left_free_on_request(tmp_path: Path, typed: Typed) -> None:
    words = ("--dynamic-size", "--to", "onnx,onnx-cuda", "--out", tmp_path, "--quiet")
    done = typed(*NET, *words)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["model"]["inputs"] == ["input_1 float32[batch, 3, height, width]"]
    row, missing = report["rows"]
    assert row["status"] == "measured" and row["providers"] == ["CPUExecutionProvider"]
    if missing["path"] is None:  # this ONNX Runtime has no CUDA provider: the other target has finished
        assert done.returncode == 4 and "pip install onnxruntime-gpu" in missing["reason"]
        assert missing["status"] == "not_run"


def test_show_prints_the_graph_before_and_after(small: Path, typed: Typed) -> None:
    done = typed("show", small / "net.pt", "--input-shape", "3,16,16", "--why")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["conv2d", "3x3", "3>8", "0", "─┬─", "conv2d", "3x3", "3>8"] in lines and [
        "batch_norm",
        "8",
        "1",
        "─╯",
    ] in lines
    assert ["BatchNorms", "1", "0", "–"] in lines and any(line[:2] == ["Bytes", "moved"] for line in lines)
    assert "alone" in done.stdout and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 132


def test_show_without_merging_keeps_the_branches(typed: Typed) -> None:
    words = ("show", "models.repvgg:repvgg_tiny", "--input-shape", "3,32,32")
    merged, apart = typed(*words).stdout, typed(*words, "--no-reparam").stdout
    rows = [line.split() for line in (merged + apart).splitlines() if line.startswith("Convolutions")]
    assert rows == [["Convolutions", "10", "5", "2.00×"], ["Convolutions", "10", "10", "1.00×"]]


def test_show_draws_and_prints_the_raw_graph(tmp_path: Path, typed: Typed) -> None:
    words = ("show", *NET)
    done = typed(*words, "--out", tmp_path / "graph.svg")
    assert done.returncode == 0 and (tmp_path / "graph.svg").read_text().startswith("<svg"), done.stderr
    assert str(tmp_path / "graph.svg") in done.stdout and "BatchNorms" in done.stdout
    assert typed(*words, "--out", tmp_path / "graph.pdf").returncode == 2
    before, after = typed(*words, "--text").stdout, typed(*words, "--text", "--fuse").stdout
    assert "batch_norm(" in before and "conv2d(" in after and "batch_norm(" not in after


def test_show_says_what_a_recipe_would_do(tmp_path: Path, typed: Typed) -> None:
    recipe = tmp_path / "r.yaml"
    passes = "passes: [FuseConvBN, PairChannels, QuantizeStatic: {calibrator: mse}, CastFP16]"
    recipe.write_text(f"{passes}\ntargets: [onnx]\ntarget_options: {{onnx: {{opset: 18}}}}\nkeep: [head, a.b]\n")
    done = typed("show", "--recipe", recipe)
    assert done.returncode == 0, done.stderr
    told = [" ".join(line.split()) for line in done.stdout.splitlines()]
    starts = ("FuseConvBN every file exact", "PairChannels files of the next", "QuantizeStatic files of its own lossy")
    assert all(any(line.startswith(start) for line in told) for start in (*starts, "onnx yes ONNX file"))
    assert {"calibrator: mse", "opset: 18", "keep: head, a.b"} <= set(told) and "--calib DATA" in told[1]
    for words in ((), (*NET, "--recipe", recipe), ("--recipe", recipe, "--text")):
        assert typed("show", *words).returncode == 2


def test_passes_are_listed(typed: Typed) -> None:
    passes = typed("passes").stdout
    assert all(name in passes for name in ("FuseConvBN", "Reparameterize", "QuantizeStatic", "PruneChannels", "Script"))
