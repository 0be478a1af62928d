"""What ``optimize run`` asks for, from its options and a recipe."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from optimize import datasets, workflow
from optimize.cli import cli
from optimize.cli.run import run
from optimize.errors import UsageError
from optimize.job import Job
from optimize.passes import PruneChannels
from optimize.recipe import PassEntry, parse

RECIPE = """\
passes: [FuseConvBN]
targets: [openvino, tensorrt]
target_options:
  openvino: {hint: throughput}
  tensorrt: {max_batch: 16}
"""


class Started(Exception):
    """Raised in place of a run."""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What runs that only start were asked for."""
    jobs: list[Job] = []

    def start(job: Job, **_: object) -> None:
        jobs.append(job)
        raise Started

    monkeypatch.setattr(workflow, "run_job", start)
    return jobs


def asked(jobs: list[Job], *words: str) -> dict[str, dict[str, object]]:
    """Return the passes and options that a command line asks for."""
    given = ["package.module:factory", "--to", "onnx", *words]
    assert isinstance(CliRunner().invoke(run, given).exception, Started)
    return {entry.name: entry.options for entry in jobs[-1].recipe.passes}


def test_an_option_of_a_target_replaces_that_one_of_the_recipe_alone(tmp_path: Path, jobs: list[Job]) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = ["package.module:factory", "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")]
    given = ["--target-option", "openvino.hint=latency", "--target-option", "tensorrt.min_batch=2"]
    for options in ([], given):
        assert isinstance(CliRunner().invoke(run, [*words, *options]).exception, Started)
    before, after = (job.recipe.target_options for job in jobs)
    assert before == {"openvino": {"hint": "throughput"}, "tensorrt": {"max_batch": 16}}
    assert after == {
        "openvino": {"hint": "latency"},
        "tensorrt": {"max_batch": 16, "min_batch": 2},
    }


def test_effort_says_which_passes_prepare_int8_and_how_ranges_are_chosen(jobs: list[Job]) -> None:
    quick = {"PairChannels": {}, "QuantizeStatic": {"calibrator": "mse", "spare": 0.0}}
    assert asked(jobs, "--int8=static", "--effort", "quick") == quick
    near = {"unless_near": True}
    usual = {"EqualizeChannels": near, "SmoothActivations": near, "PairChannels": {}, "QuantizeStatic": {}}
    assert asked(jobs, "--int8=static") == asked(jobs, "--int8=static", "--effort", "default") == usual
    best = ["AbsorbBias", "EqualizeChannels", "SmoothActivations", "PairChannels", "QuantizeStatic"]
    assert list(asked(jobs, "--int8=static", "--effort", "best")) == best
    assert "PairChannels" not in asked(jobs, "--int8=static", "--effort", "quick", "--cpu", "vnni")


def test_a_named_pass_stands_where_its_stage_and_promise_put_it(jobs: list[Job]) -> None:
    """An exact one before what cuts, all on the graph before INT8, and what prepares for INT8 before that."""
    own = "CastFP16:keep=head,body,io=half", "AbsorbBias", "optimize.passes:FuseConvBN", "Script"
    words = [word for text in own for word in ("--pass", text)]
    flags = ["--fuse", "--prune", "0.5", "--int8=static", "--effort", "quick", "--cpu", "vnni"]
    passes = asked(jobs, *flags, *words)
    graph = ["FuseBNSign", "Reparameterize", "FuseConvBN", "SelectEarly", "optimize.passes:FuseConvBN"]
    assert list(passes) == [*graph, "PruneChannels", "AbsorbBias", "QuantizeStatic", "CastFP16", "Script"]
    assert passes["CastFP16"] == {"keep": "head,body", "io": "half"}
    wrong = {"a b": r"NAME\[:OPTION=VALUE", "FuseConvBn": "no pass", "AbsorbBias:x=1": "no option 'x'"}
    for text, message in wrong.items():
        with pytest.raises(UsageError, match=message):
            CliRunner().invoke(run, ["a.b:c", "--to", "onnx", "--pass", text], catch_exceptions=False)


def test_dynamic_int8_is_smoothed_where_there_is_data(jobs: list[Job]) -> None:
    assert list(asked(jobs, "--int8=dynamic")) == ["QuantizeDynamic"]
    given = asked(jobs, "--int8=dynamic", "--calib", "models/fashion_calib.npz")
    assert given == {"SmoothActivations": {"unless_near": True}, "QuantizeDynamic": {}}


@pytest.mark.parametrize("words", [["--fuse"], ["--int8=dynamic"], ["--recipe", "recipes/int8-server.yaml"]])
def test_effort_needs_what_it_is_about(words: list[str]) -> None:
    given = ["package.module:factory", "--to", "onnx", *words, "--effort", "best"]
    refused = CliRunner().invoke(run, given).exception
    assert isinstance(refused, UsageError) and refused.hint and "--int8" in refused.hint


@pytest.mark.parametrize("words", [("--max-drop", ""), ("--max-drop=",), ("--dynamic", "")])
def test_an_empty_word_is_refused(words: tuple[str, ...]) -> None:
    """As where a variable of a CI is not set: there would be no bound, and success."""
    refused = CliRunner().invoke(cli, ["package.module:factory", "--to", "onnx", *words]).exception
    assert isinstance(refused, UsageError) and refused.what == f"{words[0].rstrip('=')} is empty."


def test_targets_may_be_given_one_by_one(jobs: list[Job]) -> None:
    asked(jobs, "--to", "openvino,onnx", "--to", "tensorrt")
    assert jobs[-1].recipe.targets == ("onnx", "openvino", "tensorrt")


def test_what_a_share_to_prune_is_of(jobs: list[Job]) -> None:
    assert asked(jobs, "--prune", "0.3") == {"PruneChannels": {"ratio": 0.3}}
    assert asked(jobs, "--prune", "30%") == {"PruneChannels": {"ratio": 0.3}}
    assert asked(jobs, "--prune", "macs=0.5")["PruneChannels"] == {"ratio": 0.5, "of": "macs"}
    assert asked(jobs, "--prune", "params=0.25")["PruneChannels"] == {"ratio": 0.25, "of": "params"}
    fpgm = {"ratio": 0.5, "of": "macs", "criterion": "fpgm"}
    assert asked(jobs, "--prune", "macs=0.5", "--criterion", "fpgm")["PruneChannels"] == fpgm
    alone = CliRunner().invoke(run, ["package.module:factory", "--to", "onnx", "--criterion", "fpgm"])
    assert alone.exit_code and "none goes" in str(alone.exception)
    for words, message in (
        ("1.5", "not in the range"),
        ("100%", "not in the range"),
        ("bytes=0.5", "macs, params"),
        ("macs=half", "not a valid"),
        ("macs=nan", "Invalid value for '--prune': 'nan' is no share"),
    ):
        done = CliRunner().invoke(run, ["package.module:factory", "--to", "onnx", "--prune", words])
        assert done.exit_code == 2 and message in done.output


def test_bits_of_weights_alone(jobs: list[Job]) -> None:
    assert asked(jobs, "--weights", "2.5bits") == {"QuantizeWeights": {"bits": 2.5}}
    assert asked(jobs, "--weights", "3") == {"QuantizeWeights": {"bits": 3}}
    assert asked(jobs, "--int8=static", "--weights", "5.5bits")["QuantizeStatic"] == {"bits": 5.5}
    assert "QuantizeWeights" not in asked(jobs, "--int8=static", "--int4")
    assert asked(jobs, "--int4") == asked(jobs, "--weights", "4bits") == {"QuantizeWeights": {"bits": 4}}
    both = CliRunner().invoke(run, ["package.module:factory", "--to", "onnx", "--int4", "--weights", "3bits"])
    assert both.exit_code and "the same of two numbers" in str(both.exception)
    for words in ("1.5bits", "9", "four", "nan"):
        done = CliRunner().invoke(run, ["package.module:factory", "--to", "onnx", "--weights", words])
        assert done.exit_code == 2 and "is no number of bits from 2 to 8" in done.output


def test_a_time_to_keep_cuts_by_the_layers_times(jobs: list[Job]) -> None:
    assert asked(jobs, "--latency", "0.5x") == {"PruneChannels": {"ratio": 0.95, "of": "time"}}
    assert jobs[-1].recipe.latency == "0.5x"
    assert asked(jobs, "--latency", "5ms", "--prune", "macs=0.8")["PruneChannels"] == {"ratio": 0.8, "of": "macs"}


def test_a_recipe_says_what_is_cut() -> None:
    asked = {"ratio": 0.5, "of": "macs", "intact": ["head"]}
    (entry,) = parse({"passes": [{"PruneChannels": asked}]}, source="it").passes
    made = entry.build([torch.zeros(2, 3)])
    assert isinstance(made, PruneChannels)
    assert (made.of, made.intact, made.round_to) == ("macs", ("head",), None) and made.data is not None
    assert PassEntry.of(made).options == asked


def echo() -> torch.nn.Module:
    """Return what names the class whose place in its input is 1."""
    net = torch.nn.Linear(4, 4, bias=False)
    net.weight.data = torch.eye(4)
    return net.eval()


@pytest.mark.parametrize(
    ("shift", "run_of", "tried", "told"),
    [
        (0, 1, 32, ""),
        (1, 1, 256, "The original has 0.00 % of 256 labels right, and always naming the most frequent of them"),
        (0, 75, 32, ""),  # by class, one behind the other
    ],
)
def test_an_original_that_guesses_is_told_before_files_are_made(
    shift: int, run_of: int, tried: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said at the end, behind minutes of searches; one that does more is tried on a few labels alone."""

    class Counting(datasets.AccuracyMeter):
        def update(self, expected: dict, found: dict, labels: np.ndarray) -> None:
            counted.append(len(labels))
            super().update(expected, found, labels)

    def start(*_: object) -> None:
        raise Started

    counted: list[int] = []
    monkeypatch.setattr(datasets, "AccuracyMeter", Counting)
    monkeypatch.setattr(workflow, "write_baseline", start)
    classes = np.arange(300) // run_of % 4
    np.savez(tmp_path / "eval.npz", x=np.eye(4, dtype=np.float32)[classes], y=(classes + shift) % 4)
    words = ["tests.cli.test_run:echo", "--to", "onnx", "--eval", tmp_path / "eval.npz", "--out", tmp_path / "out"]
    done = CliRunner().invoke(run, list(map(str, words)))
    assert isinstance(done.exception, Started) and sum(counted) == tried
    said = [line for line in done.stderr.splitlines() if line.startswith("optimize: ")]
    assert [f"optimize: Seen on the first labels, before files are made: {told}" in line for line in said] == (
        [True] if told else []
    )
