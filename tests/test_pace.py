"""How much is cut for a time that is asked, by a clock that reads a file's size: what is searched, said and written."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from torch import nn

import optimize
from optimize import bounds, pace, pipeline
from optimize import wording as form
from optimize.cli.run import run
from optimize.errors import Refused, TargetUnavailable, UsageError
from optimize.measure.latency import Latency, MeasureResult, Timing
from optimize.measure.layer_times import LayerTime
from optimize.measure.runs import Speedup
from optimize.ops import layer_paths
from optimize.program import Program
from optimize.pruning.budget import Budget, Measure
from optimize.pruning.compensation import Survey
from optimize.pruning.groups import dependencies
from optimize.targets.base import Artifact
from optimize.targets.tensorrt import TensorRT

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("files_run_here")

#: Seconds of a file: what every run takes, and what each byte does.
_CALL_S, _BYTE_S = 1e-4, 1e-8


class Net(nn.Module):
    """Wide enough that a hundredth of it can go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 96, 3), nn.Conv2d(96, 128, 3), nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make time a matter of bytes; return the list that every timed file's seconds go into, the uncut one's first."""
    seen: list[float] = []

    def gather(files: Sequence[Artifact], **_: Any) -> AbstractContextManager[Sequence[Artifact]]:
        return nullcontext(files)

    def measure(files: Sequence[Artifact], inputs: Sequence[np.ndarray], **_: Any) -> MeasureResult:
        assert [entry.shape[0] for entry in inputs] == [1]
        took = [_CALL_S + _BYTE_S * file.path.stat().st_size for file in files]
        seen.extend(took[-1:] if seen else took)
        ratios = [Speedup(took[0] / each, 0.99 * took[0] / each, 1.01 * took[0] / each) for each in took]
        timings = [
            Timing(Latency(each, None, each, each, (each,), each, 0.0, 1, 1), ratio)
            for each, ratio in zip(took, ratios, strict=True)
        ]
        return MeasureResult(tuple(timings), 1)

    def layer_times(plain: tuple[Program, Artifact], last: tuple[Program, Artifact], *_: Any, **__: Any) -> Any:
        weights = {"first": 1e-5, "second": 1e-3, "head": 1e-6}
        return {name: LayerTime(1.0, weights[path]) for name, path in layer_paths(last[0].graph).items()}

    monkeypatch.setattr(pace, "Fleet", gather)
    monkeypatch.setattr(pace, "measure", measure)
    monkeypatch.setattr(pace, "layer_times", layer_times)
    return seen


def paced(net: nn.Module, asked: str, out: Path, cut: optimize.PruneChannels, **options: Any) -> Any:
    data = torch.rand(8, 3, 12, 12)
    return optimize.optimize(net, (data[:2],), passes=[cut], targets="onnx", latency=asked, out=out, **options)


@pytest.mark.parametrize(
    ("asked", "of"), [("0.6x", "time"), ("0.35x", "macs"), ("700us", "params"), ("0.35x", "channels")]
)
def test_a_file_is_cut_to_the_time_that_is_asked(
    net: Net, timed: list[float], tmp_path: Path, asked: str, of: Measure
) -> None:
    report = paced(net, asked, tmp_path, optimize.PruneChannels(0.97, 1, of=of))
    number, is_share = bounds.read_pace(asked)
    wanted = number * timed[0] if is_share else number
    found = _CALL_S + _BYTE_S * Path(report.rows[0].path).stat().st_size
    assert 0.94 * wanted <= found <= 1.03 * wanted  # the file says more of itself than a trial
    assert len(timed) <= 7
    (told,) = (warning for warning in report.warnings if warning.startswith(f"--latency {asked}: the onnx file takes "))
    assert f"of the uncut one's {form.seconds(timed[0])}; cut: " in told
    assert ("layers' time, by estimate" in told) == (of == "time")
    assert not any("were asked for" in warning for warning in report.warnings)


def test_where_eight_channels_of_a_layer_jump_over_a_time_others_come_back(
    timed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight channels of its first layer are a fifth of this file, and the recipe says which layer lost them."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 512, 3), nn.ReLU(), nn.Conv2d(512, 4, 1)]
    net = nn.Sequential(*layers).eval()
    program = optimize.capture(net, (torch.rand(2, 3, 12, 12),))
    shares = [share / 400 for share in range(1, 360)]
    cut = lambda share: _width(optimize.PruneChannels(share, of="params").apply(program)[0], "0") < 32  # noqa: E731
    place = bisect_left(shares, True, key=cut)  # the more goes, the less is left
    before, behind = (
        _seconds_of(optimize.PruneChannels(share, of="params"), program, tmp_path)
        for share in shares[place - 1 : place + 1]
    )
    whole = _seconds_of(optimize.PruneChannels(0.0, of="params"), program, tmp_path)
    assert behind < 0.9 * before
    made: list[Any] = []
    monkeypatch.setattr(pace, "transform", lambda *given: made.append(given) or pipeline.transform(*given))
    asked = (0.3 * before + 0.7 * behind) / whole
    report = paced(net, f"{asked:.4f}x", tmp_path / "out", optimize.PruneChannels(0.9, of="params"))
    assert len(made) == len(timed)  # what follows a cut runs once for a file
    assert 0.96 * asked <= (_CALL_S + _BYTE_S * Path(report.rows[0].path).stat().st_size) / whole <= 1.02 * asked
    ((_, options),) = yaml.safe_load((tmp_path / "out/recipe.yaml").read_text())["passes"][0].items()
    assert options["ceilings"] == {"0": 24}


def test_where_no_other_comes_back_granules_are_halved(timed: list[float], tmp_path: Path) -> None:
    """Eight channels of 32 are a fifth of this file, and nothing else of it can go."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 256, 3), nn.ReLU(), nn.Flatten()).eval()
    paced(net, "0.85x", tmp_path / "a", optimize.PruneChannels(0.9, 8, of="params"))
    assert timed[-1] < 0.8 * timed[0]
    report = paced(net, "0.85x", tmp_path / "b", optimize.PruneChannels(0.9, of="params"))
    assert 0.96 * 0.85 * timed[0] <= _CALL_S + _BYTE_S * Path(report.rows[0].path).stat().st_size <= 0.87 * timed[0]
    ((_, options),) = yaml.safe_load((tmp_path / "b/recipe.yaml").read_text())["passes"][0].items()
    assert options["round_to"] in (4, 2, 1)


def _width(program: Program, path: str) -> int:
    return int(program.graph_module.get_parameter(f"{path}.weight").shape[0])


def _seconds_of(cut: optimize.PruneChannels, program: Program, folder: Path) -> float:
    file = optimize.export(cut.apply(program)[0], "onnx", folder / "tried.onnx")
    return _CALL_S + _BYTE_S * file.path.stat().st_size


def test_the_recipe_cuts_the_same_and_times_nothing(
    net: Net, timed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [torch.rand(16, 3, 12, 12)]
    first = paced(net, "0.5x", tmp_path / "a", optimize.PruneChannels(0.95, of="time", calibration=data))
    recipe = yaml.safe_load((tmp_path / "a/recipe.yaml").read_text())
    ((name, options),) = recipe["passes"][0].items()
    assert "latency" not in recipe and name == "PruneChannels" and 0 < options["ratio"] < 0.95
    assert options["times"] == {"first": 1e-5, "second": 1e-3, "head": 1e-6}
    count = len(timed)
    cut = optimize.PruneChannels(**options, calibration=data)
    again = optimize.optimize(net, (torch.rand(2, 3, 12, 12),), passes=[cut], targets="onnx", out=tmp_path / "b")
    assert len(timed) == count and again.rows[0].sha256 == first.rows[0].sha256


def deep() -> nn.Module:
    """Ten layers of which most parts can be one."""
    blocks = [part for _ in range(4) for part in (nn.Conv2d(16, 96, 1), nn.ReLU(), nn.Conv2d(96, 16, 1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).eval()


def test_layers_go_until_a_file_takes_what_is_asked_and_the_recipe_says_which(
    timed: list[float], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, data = deep(), [torch.rand(32, 3, 12, 12)]
    cut = optimize.ReduceDepth(0.95, of="params", calibration=data)
    inputs = (data[0][:2],)
    first = optimize.optimize(net, inputs, passes=[cut], targets="onnx", latency="0.7x", out=tmp_path / "a")
    found = _CALL_S + _BYTE_S * Path(first.rows[0].path).stat().st_size
    assert 0.5 * timed[0] <= found <= 0.72 * timed[0]  # a part is a large granule
    assert any(warning.startswith("--latency 0.7x: the onnx file ") for warning in first.warnings)
    ((name, options),) = yaml.safe_load((tmp_path / "a/recipe.yaml").read_text())["passes"][0].items()
    assert name == "ReduceDepth" and 0 < options["ratio"] < 0.95
    again = optimize.optimize(
        net, inputs, passes=[optimize.ReduceDepth(**options, calibration=data)], targets="onnx", out=tmp_path / "b"
    )
    assert again.rows[0].sha256 == first.rows[0].sha256


def test_the_last_file_is_what_keeps_the_time(net: Net, timed: list[float], tmp_path: Path) -> None:
    data = [torch.rand(16, 3, 12, 12)]
    quantize = optimize.QuantizeStatic(calibration=data)
    report = optimize.optimize(
        net,
        (data[0][:2],),
        passes=[optimize.PruneChannels(0.95, 1, of="macs", calibration=data), quantize],
        targets="onnx",
        latency="0.7x",
        layer_timing=False,
        out=tmp_path,
    )
    integer = _CALL_S + _BYTE_S * Path(report.rows[1].path).stat().st_size
    assert integer == pytest.approx(0.7 * timed[0], rel=0.06)


def test_a_file_that_is_fast_enough_loses_nothing(net: Net, timed: list[float], tmp_path: Path) -> None:
    report = paced(net, "1s", tmp_path, optimize.PruneChannels(0.9, of="macs"))
    (told,) = (warning for warning in report.warnings if "--latency 1s" in warning)
    assert "the uncut file takes" in told
    assert len(timed) == 1 and report.rows[0].agreement.sqnr_db > 90


def test_what_cutting_does_not_reach_is_told_with_what_it_does(net: Net, timed: list[float], tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"not reached by cutting. --latency 0.2x: .* 30.0 % of the macs") as refused:
        paced(net, "0.2x", tmp_path / "out", optimize.PruneChannels(0.3, of="macs"))
    assert "--int8" in (refused.value.hint or "") and not (tmp_path / "out").exists()


def test_a_time_needs_something_to_cut_and_something_that_runs(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no pass prunes"):
        optimize.optimize(net, (torch.rand(2, 3, 12, 12),), latency="0.5x", out=tmp_path)
    with pytest.raises(UsageError, match="needs the time of each layer"):
        optimize.Pipeline([optimize.PruneChannels(0.5, of="time")]).run(
            optimize.capture(net, (torch.rand(2, 3, 12, 12),))
        )
    here = TensorRT().available()
    if not here.run:
        cut = optimize.PruneChannels(0.5, of="macs")
        with pytest.raises(TargetUnavailable, match="does not run here"):
            optimize.optimize(
                net, (torch.rand(2, 3, 12, 12),), passes=[cut], targets="tensorrt", latency="0.5x", out=tmp_path
            )


@pytest.mark.parametrize("words", ["5", "1.5x", "x", "0x", "5 minutes", "0ms", "-3ms", "nanx", "infs", ""])
def test_what_is_no_time_is_a_usage_error(words: str) -> None:
    with pytest.raises(ValueError, match=r"unit|time|bounds|could not convert"):
        bounds.read_pace(words)
    with pytest.raises(ValueError, match=r"'0.6' needs a unit: s, ms, us, x, such as 5ms, or 0.5x for that share"):
        bounds.read_pace("0.6")
    if words:
        done = CliRunner().invoke(run, ["package.module:factory", "--to", "onnx", f"--latency={words}"])
        assert done.exit_code == 2


def test_time_goes_where_it_is_spent(net: Net) -> None:
    program = optimize.capture(net, (torch.rand(2, 3, 12, 12),))
    heavy = {"first": 1e-3, "second": 1e-6, "head": 1e-6}
    _, outcome = optimize.PruneChannels(0.4, 1, of="time", times=heavy).apply(program)
    widths = {rewrite.where: rewrite.what for rewrite in outcome.rewrites}
    assert set(widths) == {"first"}, "the second layer takes no time, and weighs the most"
    assert outcome.notes[-1].startswith("40.")
    found = dependencies(program)
    assert Budget(program, found, "time", heavy).total == pytest.approx(sum(heavy.values()))


def test_a_survey_is_what_the_data_said(net: Net) -> None:
    program = optimize.capture(net, (torch.rand(2, 3, 12, 12),))
    cut = optimize.PruneChannels(0.4, of="macs", calibration=[torch.rand(32, 3, 12, 12)])
    survey = cut.survey(program)
    known = optimize.PruneChannels(0.4, of="macs", calibration=survey)
    assert isinstance(survey, Survey) and known.survey(program) is survey and known.data is cut.data
    (one, _), (other, _) = cut.apply(program), known.apply(program)
    for name, value in one.graph_module.state_dict().items():
        assert torch.equal(value, other.graph_module.state_dict()[name])


@pytest.mark.slow
def test_real_files_are_cut_by_a_real_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take is nobody's to say here; that half of the time is reached by less than all that may go is."""
    monkeypatch.setattr(pace, "_BUDGET_S", 0.3)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Conv2d(128, 8, 3)).eval()
    data = torch.rand(8, 3, 24, 24)
    cut = optimize.PruneChannels(0.95, of="time", calibration=[data])
    report = optimize.optimize(net, (data[:2],), passes=[cut], targets="onnx", latency="0.5x", out=tmp_path)
    options = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["passes"][0]["PruneChannels"]
    assert 0 < options["ratio"] <= 0.95 and set(options["times"]) == {"0", "2", "4"}
    assert report.rows[0].status == "measured" and min(options["times"].values()) > 0
