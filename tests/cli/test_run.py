"""What ``optimize run`` asks for, from its options and a recipe."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from optimize import workflow
from optimize.cli.run import run
from optimize.errors import UsageError
from optimize.job import Job

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


@pytest.mark.parametrize("words", [["--fuse"], ["--int8=dynamic"], ["--recipe", "recipes/int8-server.yaml"]])
def test_effort_needs_what_it_is_about(words: list[str]) -> None:
    given = ["package.module:factory", "--to", "onnx", *words, "--effort", "best"]
    refused = CliRunner().invoke(run, given).exception
    assert isinstance(refused, UsageError) and refused.hint and "--int8" in refused.hint


def test_targets_may_be_given_one_by_one(jobs: list[Job]) -> None:
    asked(jobs, "--to", "openvino,onnx", "--to", "tensorrt")
    assert jobs[-1].recipe.targets == ("onnx", "openvino", "tensorrt")
