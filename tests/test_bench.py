"""``optimize bench`` as a user types it: two runtimes, a crash, a machine that lacks something, and bad words."""

import json
from pathlib import Path

import pytest
import torch

import optimize
from tests.test_cli import Typed

QUICK = ("--restarts", 2, "--runs", 12, "--quiet")


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class DyingAtRun50(torch.nn.Module):
    """Runs 49 times and ends the process: after its warm-up, in the middle of the timed runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import os
        import time

        self.calls += 1
        if self.calls == 50:
            os.abort()
        time.sleep(0.008)
        return x


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bench")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
    program = optimize.capture(net, (torch.rand(2, 8),))
    optimize.export(program, "onnx", place / "net.onnx")
    optimize.export(program, "torchscript", place / "net.torchscript.pt")
    (place / "net.engine").write_bytes(b"vtrt" + bytes(64))
    return place


def test_two_runtimes_in_a_sweep(folder: Path, tmp_path: Path, typed: Typed) -> None:
    out = tmp_path / "out"
    files = folder / "net.onnx", folder / "net.torchscript.pt"
    done = typed("bench", *files, "--batch", "1,3", "--streams", "1,2", *QUICK, "--out", out)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in out.iterdir()) == ["bench.html", "bench.json", "bench.md"]
    report = json.loads((out / "bench.json").read_text())
    assert [row["target"] for row in report["rows"]] == ["onnx", "torchscript"] and report["restarts"] == 2
    scenarios = [(1, 1), (3, 1), (1, 2)]
    for row in report["rows"]:
        assert row["status"] == "measured" and row["load_s"] > 0 and row["first_call_s"] > 0
        assert row["peak_memory_bytes"] > 5e6 and len(row["starts"]) == 2
        assert [(entry["batch"], entry["streams"]) for entry in row["scenarios"]] == scenarios
        for entry in row["scenarios"]:
            runs = [sample for block in entry["blocks"] for sample in block["samples_s"]]
            assert len(runs) == entry["runs"] >= 12 and (entry["p99_s"] is None) == (entry["runs"] < 662)
            assert entry["ci_low_s"] <= entry["median_s"] <= entry["ci_high_s"] and entry["cpu_s"] > 0
            assert (entry["speedup"] is None) == (row is report["rows"][0])
    assert report["rows"][0]["ran_on"] == ["CPUExecutionProvider"]
    assert report["rows"][1]["agreement"]["sqnr_db"] > 100
    assert report["inputs"] == ["input float32[1, 8]"] or report["inputs"][0].endswith("float32[1, 8]")
    for text in ("Batch 3", "Batch 1, 2 streams", "not offered", "Device events: none", "needs 662 runs"):
        assert text in done.stdout
    compared = typed("compare", out / "bench.json", out / "bench.json", "--out", tmp_path / "same.json")
    assert compared.returncode == 0 and "1.00×" in compared.stdout, compared.stderr
    assert len(json.loads((tmp_path / "same.json").read_text())["pairs"]) == 6


def test_advice_how_to_serve_sweeps_threads_callers_and_batches(folder: Path, tmp_path: Path, typed: Typed) -> None:
    words = ("--rate", "2000/s", "--p99", "100ms", "--batch", "1,4", "--streams", "1,2", "--threads", "1,2")
    done = typed("bench", folder / "net.onnx", *words, "--cpus", "0", *QUICK, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "To serve 2.00 k samples a second, 99 of 100 answered within 100 ms" in done.stdout
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["traffic"] == {"rate": 2000.0, "p99_s": 0.1} and report["plan"]["threads"] == 2
    assert [(row["name"], row["threads"]) for row in report["rows"]] == [
        ("net.onnx, 1 thread", 1),
        ("net.onnx, 2 threads", 2),
    ]
    for row in report["rows"]:
        serving, scenarios = row["serving"], row["scenarios"]
        assert [(entry["batch"], entry["streams"]) for entry in scenarios] == [(1, 1), (4, 1), (1, 2), (4, 2)]
        assert [entry["runs"] > 0 for entry in scenarios] == [True, True, False, False]  # one processor
        assert "2 callers with" in scenarios[2]["reason"] and serving["callers"] == 1 and serving["p99_s"] <= 0.1
        assert serving["machines"] * serving["most"] >= 2000 and serving["runs"] >= 12
    assert "net.onnx, 1 thread, batch 1, 2 streams and 1 other scenario – not run: 2 callers" in done.stdout


def test_a_crash_at_run_50_ends_in_1_and_the_other_finishes(tmp_path: Path, typed: Typed) -> None:
    sources = ("tests.test_bench:Doubling", "tests.test_bench:DyingAtRun50")
    words = ("--input-shape", "8", "--runs", 100, "--restarts", 1, "--quiet", "--out", tmp_path)
    done = typed("bench", *sources, *words)
    assert done.returncode == 1, done.stderr
    good, dead = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert good["status"] == "measured" and good["scenarios"][0]["runs"] >= 100
    assert dead["status"] == "failed" and dead["reason"] == "block: the worker was killed by SIGABRT"
    assert 3 <= dead["scenarios"][0]["runs"] < 50 and dead["scenarios"][0]["median_s"] > 0
    assert "failed: block: the worker was killed by SIGABRT" in done.stdout


def test_what_cannot_run_here_ends_in_4(folder: Path, tmp_path: Path, typed: Typed) -> None:
    done = typed("bench", folder / "net.onnx", folder / "net.engine", *QUICK, "--out", tmp_path)
    assert done.returncode == 4 and "net.engine – not run: no GPU" in done.stdout, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["measured", "not_run"]


def test_bad_words_end_in_one_paragraph(folder: Path, tmp_path: Path, typed: Typed) -> None:
    net = folder / "net.onnx"
    bad = [
        ((), 2, "A [B ...]"),
        ((net, "--batch", "1,x"), 2, "is not a whole number"),
        ((net, "--batch", "0"), 2, "0 is out of range"),
        ((net, "--affinity", "999"), 2, "There is no processor 999 here"),
        ((net, "--seconds", "0"), 2, "--seconds"),
        ((net, "--rate", "500"), 2, "needs a unit: /s"),
        ((net, "--p99", "0ms"), 2, "is nothing; write 20ms"),
        ((net, "--rate", "9" * 30 + "/s"), 2, "is more than there can be"),
        ((net, "--rate", f"0.{30 * '0'}1/s"), 2, "is nothing; write 500/s"),
        ((tmp_path / "none.onnx",), 1, "There is no file"),
        (("tests.test_bench:Doubling",), 2, "No file says what it takes"),
        ((net, "tests.test_bench:Doubling", "--input-shape", "3,4"), 2, "does not fit"),
    ]
    for words, code, message in bad:
        done = typed("bench", *words, "--out", tmp_path / "out")
        assert done.returncode == code and message in done.stderr, (words, done.stderr)
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 6
    assert not (tmp_path / "out").exists()
    (held := tmp_path / "bench.json").write_text("data")
    done = typed("bench", net, "--data", held, "--out", tmp_path)
    assert done.returncode == 2 and "where a result gets its name" in done.stderr and held.read_text() == "data"
