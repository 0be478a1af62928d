"""``--on``: another machine is asked for, behind a real sshd, and what the command says of one that does not do."""

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import optimize
from tests import sshd
from tests.sshd import Board
from tests.test_cli import Typed, command

pytestmark = sshd.NEEDS_SSHD


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    with sshd.board(tmp_path_factory.mktemp("board")) as found:
        yield found
        assert not found.left()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A network as ONNX, a copy whose weights lie in a file of an odd name, and the same with other weights."""
    onnx = pytest.importorskip("onnx")
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    base, copy, wrong = (folder / name for name in ("base.onnx", "a copy; of it.onnx", "wrong.onnx"))
    optimize.export(optimize.capture(net, (torch.rand(2, 8),)), "onnx", base)
    told = {"save_as_external_data": True, "location": "$(id) `x`.bin", "size_threshold": 0}
    onnx.save_model(onnx.load(base), str(copy), **told)
    with torch.no_grad():
        net[2].weight.neg_()
    optimize.export(optimize.capture(net, (torch.rand(2, 8),)), "onnx", wrong)
    return base, copy, wrong


@pytest.fixture
def typed_on(board: Board, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Returns a function that runs a command in this process, which finds the board's ``ssh``."""
    monkeypatch.setenv("PATH", board.path)
    return functools.partial(typed, cwd=tmp_path)


@pytest.fixture
def ask(board: Board, tmp_path: Path, typed_on: Typed) -> Callable[..., tuple[int, dict[str, object]]]:
    """Returns a function that checks two files here or there, and returns the exit code and the record."""

    def check(*words: object, there: bool) -> tuple[int, dict[str, object]]:
        where = ("--on", board.url(), "--trust") if there else ()
        done = typed_on("check", *words, *where, "--json", tmp_path / "c.json")
        assert (tmp_path / "c.json").exists(), done.stderr
        return done.returncode, json.loads((tmp_path / "c.json").read_text())

    return check


def test_verdicts_are_those_of_this_machine(
    files: tuple[Path, Path, Path], tmp_path: Path, ask: Callable[..., tuple[int, dict[str, object]]]
) -> None:
    base, copy, wrong = files
    ends = []
    for there in (False, True):
        code, record = ask(base, wrong, "--seed", 1, there=there)
        (case,) = record["cases"]
        reason = re.sub(r"-\d+\.\d dB", "few dB", case["reason"])  # of as many samples as there was time for
        ends.append((code, case["verdict"], reason, *(case[side]["output_digest"] for side in ("base", "candidate"))))
    assert ends[0] == ends[1] and ends[0][:3] == (1, "fail", "the outputs agree to few dB, asked: at least 20 dB")
    code, record = ask(base, copy, "--max-regression", "1000%", "--save-baseline", tmp_path / "b.json", there=True)
    (case,) = record["cases"]
    assert (code, case["verdict"], case["sqnr_db"]) == (0, "pass", 200.0) and len(case["raw"]["restarts"]) == 3
    assert case["candidate"]["peak_memory_bytes"] > 5e6 and record["environment"]["versions"]["optimize"]
    assert json.loads((tmp_path / "b.json").read_text())["fingerprint"]["processor"] == record["environment"]["cpu"]


def test_a_benchmark_there(files: tuple[Path, Path, Path], tmp_path: Path, board: Board) -> None:
    words = (
        "--runs",
        6,
        "--restarts",
        1,
        "--threads",
        1,
        "--cpus",
        0,
        "--on",
        board.url(),
        "--trust",
        "--out",
        tmp_path,
    )
    done = command("bench", *files[:2], *words, PATH=board.path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [row["status"] for row in report["rows"]] == ["measured", "measured"]
    assert report["rows"][1]["agreement"]["sqnr_db"] == 200.0 and report["rows"][0]["ran_on"] == [
        "CPUExecutionProvider"
    ]
    assert "of another machine" in done.stdout


def test_a_runtime_that_is_not_there(
    files: tuple[Path, Path, Path], tmp_path: Path, board: Board, typed_on: Typed
) -> None:
    url = board.url(sshd.having(board, tmp_path, "numpy"))
    told = f"on {url}: ONNX Runtime is not installed (pip install onnxruntime)"
    where = ("--on", url, "--trust", "--json", tmp_path / "told.json")
    done = typed_on("check", *files[:2], *where)
    (case,) = json.loads((tmp_path / "told.json").read_text())["cases"]
    assert (done.returncode, case["reason"]) == (4, f"'base.onnx' cannot run {told}"), done.stderr
    done = typed_on("bench", *files[:2], *where)
    (row, _) = json.loads((tmp_path / "told.json").read_text())["rows"]
    assert (done.returncode, row["status"], row["reason"]) == (4, "not_run", f"not run: {told}"), done.stderr


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that a run can open, with data beside it."""
    folder = tmp_path_factory.mktemp("net")
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval(), folder / "net.pt")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).random((32, 64), np.float32))
    return folder / "net.pt"


def test_a_run_measures_on_a_machine_without_torch(net: Path, tmp_path: Path, board: Board, typed_on: Typed) -> None:
    url = board.url(sshd.having(board, tmp_path / "packages", "numpy", "onnxruntime", "flatbuffers"))
    words = ("--int8", "--calib", net.parent / "data.npz", "--to", "onnx,openvino", "--out", tmp_path / "out")
    done = typed_on("run", net, *words, "--on", url, "--trust")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {f"{row['target']} {row['precision']}": row for row in (report["baseline"], *report["rows"])}
    assert [row["status"] for row in rows.values()] == ["measured"] * 3 + ["not_run"] * 2, done.stderr
    assert all("OpenVINO is not installed" in rows[f"openvino {kind}"]["reason"] for kind in ("float32", "int8"))
    for name in ("onnx float32", "onnx int8"):
        assert rows[name]["latency"] and rows[name]["agreement"]["sqnr_db"] > 20 and rows[name]["speedup"] is None
    assert rows["eager float32"]["latency"] is None and not report["layers"]
    told = f"Files were timed and judged on {url}, which has no PyTorch: the original answered here, and was not timed."
    assert (
        told in report["warnings"] and "vs best" in done.stdout and "eager " not in done.stdout.replace("eager (", "")
    )


@pytest.fixture
def given(board: Board, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run is asked for on a machine with torch."""
    monkeypatch.setenv("PATH", board.path)
    return {"targets": "onnx", "trust": True, "on": board.url()}


@pytest.mark.slow
def test_a_run_on_a_machine_with_torch(net: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    report = optimize.optimize(net, [torch.rand(2, 64)], budget_s=2.0, out=tmp_path / "run", **given)
    assert report["onnx float32"].speedup and report.baseline.latency


@pytest.mark.slow
def test_a_search_on_a_machine_with_torch(net: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    data = [torch.rand(16, 64)]
    found = optimize.find_best(net, [torch.rand(2, 64)], calibrate=data, budget="40s", out=tmp_path / "auto", **given)
    assert found.search is not None and found.rows[0].speedup


def test_a_search_needs_torch_there(net: Path, tmp_path: Path, board: Board, typed_on: Typed) -> None:
    url = board.url(sshd.having(board, tmp_path / "packages", "numpy"))
    words = ("--calib", net.parent / "data.npz", "--to", "onnx", "--out", tmp_path / "out", "--on", url, "--trust")
    done = typed_on("auto", net, *words)
    assert done.returncode == 4 and "torch is not installed (pip install torch)" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("bench", "--on", "ssh://-oProxyCommand=touch x", "--trust"), 2, "names no machine"),
        (("check", "--on", "a;b", "--trust"), 2, "names no machine"),
        (("bench", "--on", "ssh://board"), 1, "needs --trust to run on another machine"),
        (("check", "--on", "ssh://board"), 4, "needs --trust to run on another machine"),
        (("bench", "--on", "ssh://board", "--trust", "--device", "cuda"), 2, "--device cuda"),
        (("check", "--on", "ssh://board", "--trust", "--verify-on", "avx2"), 2, "--verify-on"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], code: int, told: str, files: tuple[Path, Path, Path], tmp_path: Path, typed: Typed
) -> None:
    name, *rest = words
    done = typed(name, *files[:2], *rest, cwd=tmp_path)
    assert done.returncode == code and told in done.stderr
    assert not (tmp_path / "x").exists()


def test_nothing_is_left_there_by_a_machine_that_is_not_reached(
    files: tuple[Path, Path, Path], tmp_path: Path, board: Board, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", board.path)
    sshd.configure(board, key="stranger")
    try:
        done = typed("bench", *files[:2], "--on", board.url(), "--trust", cwd=tmp_path)
    finally:
        sshd.configure(board)
    assert done.returncode == 4 and "Permission denied" in done.stderr and not board.folders
    assert shutil.which("ssh") == str(board.folder / "bin" / "ssh")
