"""What ``optimize run`` asks for, from its options and a recipe."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from optimize import workflow
from optimize.cli.run import run
from optimize.job import Job

RECIPE = """\
passes: [FuseConvBN]
targets: [openvino, tensorrt]
target_options:
  openvino: {hint: throughput, cache: compiled}
  tensorrt: {max_batch: 16}
"""


class Started(Exception):
    """Raised in place of a run."""


def test_an_option_of_a_target_replaces_that_one_of_the_recipe_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []

    def start(job: Job, **_: object) -> None:
        jobs.append(job)
        raise Started

    monkeypatch.setattr(workflow, "run_job", start)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = ["package.module:factory", "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")]
    given = ["--target-option", "openvino.hint=latency", "--target-option", "tensorrt.min_batch=2"]
    for options in ([], given):
        assert isinstance(CliRunner().invoke(run, [*words, *options]).exception, Started)
    before, after = (job.recipe.target_options for job in jobs)
    assert before == {"openvino": {"hint": "throughput", "cache": "compiled"}, "tensorrt": {"max_batch": 16}}
    assert after == {
        "openvino": {"hint": "latency", "cache": "compiled"},
        "tensorrt": {"max_batch": 16, "min_batch": 2},
    }
