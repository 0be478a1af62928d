"""Other ways to run the eager file: the same answers, and a reason where the machine lacks what a way needs."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize.errors import TargetUnavailable
from optimize.program import Program
from optimize.registry import find_target
from optimize.targets.eager import Way

GPU = ("cuda", "cuda-channels-last", "cuda-autocast", "cuda-compile", "cuda-graphs")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(torch.relu(self.conv(x)).mean((2, 3)))


def program() -> Program:
    """Return ``Net`` captured, nothing of it shared."""
    return _captured().clone()


@functools.cache
def _captured() -> Program:
    torch.manual_seed(0)
    return optimize.capture(Net().eval(), (torch.randn(2, 3, 8, 8),))


@pytest.mark.parametrize("channels_last, autocast", list(itertools.product([False, True], ["", "bfloat16"])))
def test_a_way_answers_like_the_module(channels_last: bool, autocast: str) -> None:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(5, 3, 8, 8)
    wanted = net(x)
    found = Way(channels_last=channels_last, autocast=autocast).prepare(net)(x)
    assert found.dtype is (torch.bfloat16 if autocast else torch.float32)
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last) is channels_last
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=2e-2 if autocast else 1e-5)


@pytest.mark.parametrize("name", [pytest.param("compile", marks=pytest.mark.slow), "channels-last"])
def test_files_run_at_two_batch_sizes(name: str, tmp_path: Path) -> None:
    target = find_target(name)
    if not target.available().run:
        pytest.skip(target.available().install)
    subject = program()
    artifact = target.export(subject, tmp_path / f"net{target.suffix}")
    assert artifact.target == target.name and artifact.load(threads=1).artifact is artifact
    runner = artifact.load(threads=1)
    for batch in (1, 5):
        x = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))
        torch.testing.assert_close(runner(x), subject(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("graphs, mode", [(False, "default"), (True, "reduce-overhead")])
def test_graphs_are_a_mode_of_the_compiler(graphs: bool, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, mode: asked.append(mode) or module)
    x = torch.randn(2, 3, 8, 8)
    Way(compiled=not graphs, graphs=graphs).prepare(Net().eval())(x)
    assert asked == [mode] and find_target("cuda-graphs").way.graphs


@pytest.mark.parametrize("name", GPU)
def test_without_a_gpu_a_row_is_absent_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = find_target(name)
    for version, reason in ((None, "built for CPUs alone"), ("13.0", "no CUDA device was found")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert reason in target.available().reason and not target.available().run
        with pytest.raises(TargetUnavailable, match=reason):
            target.export(program(), tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


def test_with_a_gpu_the_row_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = find_target("cuda").available()
    assert found.run and found.export


def test_without_a_compiler_nothing_is_compiled_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in find_target("compile").available().reason
    assert find_target("channels-last").available().run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", GPU)
def test_the_gpu_answers_like_the_program(name: str, tmp_path: Path) -> None:
    target, subject = find_target(name), program()
    runner = target.export(subject, tmp_path / f"net{target.suffix}").load()
    for batch in (1, 5):
        x = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))
        found = runner(x)
        assert found.dtype is (torch.float16 if name == "cuda-autocast" else torch.float32)
        torch.testing.assert_close(found.float(), subject(x), rtol=0, atol=2e-2)
