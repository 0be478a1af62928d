"""``--on``: another machine is asked for, behind a real sshd, and what the command says of one that does not do."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

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
def ask(board: Board, tmp_path: Path) -> Callable[..., tuple[int, dict[str, object]]]:
    """Returns a function that checks two files here or there, and returns the exit code and the record."""

    def check(*words: object, there: bool) -> tuple[int, dict[str, object]]:
        where = ("--on", board.url(), "--trust") if there else ()
        done = command("check", *words, *where, "--json", tmp_path / "c.json", cwd=tmp_path, PATH=board.path)
        assert (tmp_path / "c.json").exists(), done.stderr
        return done.returncode, json.loads((tmp_path / "c.json").read_text())

    return check


def test_verdicts_are_those_of_this_machine(
    files: tuple[Path, Path, Path], tmp_path: Path, ask: Callable[..., tuple[int, dict[str, object]]]
) -> None:
    base, copy, wrong = files
    ends = []
    for there in (False, True):
        code, record = ask(base, wrong, there=there)
        (case,) = record["cases"]
        ends.append(
            (code, case["verdict"], case["reason"], *(case[side]["output_digest"] for side in ("base", "candidate")))
        )
    assert ends[0] == ends[1] and ends[0][:2] == (1, "fail")
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


def test_a_runtime_that_is_not_there(files: tuple[Path, Path, Path], tmp_path: Path, board: Board) -> None:
    url = board.url(sshd.numpy_alone(board, tmp_path))
    told = f"on {url}: ONNX Runtime is not installed (pip install onnxruntime)"
    where = ("--on", url, "--trust", "--json", tmp_path / "told.json")
    done = command("check", *files[:2], *where, cwd=tmp_path, PATH=board.path)
    (case,) = json.loads((tmp_path / "told.json").read_text())["cases"]
    assert (done.returncode, case["reason"]) == (4, f"'base.onnx' cannot run {told}"), done.stderr
    done = command("bench", *files[:2], *where, cwd=tmp_path, PATH=board.path)
    (row, _) = json.loads((tmp_path / "told.json").read_text())["rows"]
    assert (done.returncode, row["status"], row["reason"]) == (4, "not_run", f"not run: {told}"), done.stderr


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
