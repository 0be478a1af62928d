"""What torch's exporter translates wrongly is translated anew: files answer as the module at every size and value."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import workflow
from optimize.errors import Refused
from tests.nets import Called

TARGETS = {"onnx": ".onnx", "openvino": ".xml"}


def padded(x: Tensor) -> Tensor:
    """Pads to a multiple of four, as it is often written: minus a quotient of a negative size rounded down."""
    return nn.functional.pad(x, (0, -(-x.shape[2] // 4) * 4 - x.shape[2]))


def halved(x: Tensor) -> Tensor:
    """Counts pairs of samples by a negative divisor."""
    return x * -(x.shape[0] // -2)


def scattered(include_self: bool) -> Callable[[Tensor], Tensor]:
    places = torch.tensor([[0, 0, 2, 2, 1, 0, 2]])

    def scatter(x: Tensor) -> Tensor:
        into = x[:, 0, :5] * 2
        return into.scatter_reduce(1, places.expand(x.shape[0], 7), x[:, 1, :7], "mean", include_self=include_self)

    return scatter


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "padded": padded,
    "halved": halved,
    "around the ends": lambda x: nn.functional.pad(x, (2, 1), mode="circular") * 3,
    "around in two axes": lambda x: nn.functional.pad(x[:, None], (0, 2, 1, 3), mode="circular"),
    "mean with what was there": scattered(True),
    "mean without": scattered(False),
    "log_sigmoid": lambda x: nn.functional.logsigmoid(x * 40),
    "log_sigmoid and a batch norm taken apart": lambda x: nn.functional.logsigmoid(nn.functional.instance_norm(x) * 40),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_files_answer_as_the_module(case: str, target: str, tmp_path: Path) -> None:
    net = Called(lambda _, x: CASES[case](x)).eval()
    dynamic = {"x": {2: "length"}} if case in ("padded", "around the ends") else None
    program = optimize.capture(net, (torch.randn(2, 3, 8),), dynamic=dynamic)
    runner = optimize.export(program, target, tmp_path / f"net{TARGETS[target]}").load(threads=1)
    for samples, length in ((1, 8), (3, 9 if dynamic else 8), (4, 11 if dynamic else 8)):
        x = torch.randn(samples, 3, length)
        (answer,) = runner.run([x.numpy()])
        wanted = net(x).numpy()
        assert answer.shape == wanted.shape and np.isfinite(answer).all()
        np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_a_recurrent_layer_that_projects_is_refused_by_name(target: str, tmp_path: Path) -> None:
    net = nn.Sequential(OrderedDict(speech=nn.LSTM(4, 6, proj_size=3)))
    with pytest.raises(Refused, match=r"no LSTM whose outputs are projected \(proj_size\), as those of 'speech' are"):
        optimize.export(
            optimize.capture(net.eval(), (torch.randn(5, 2, 4),)), target, tmp_path / f"net{TARGETS[target]}"
        )


def test_quotients_of_sizes_that_are_never_negative_are_left_as_they_are(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    program = optimize.capture(Called(lambda _, x: x * (x.shape[0] // 2)).eval(), (torch.randn(2, 3, 8),))
    optimize.export(program, "onnx", tmp_path / "net.onnx")
    found = [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
    assert "Div" in found and "Mod" not in found


@pytest.mark.usefixtures("files_run_here")
def test_a_file_that_is_right_at_even_batches_alone_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimize.targets.onnx_graph.export._is_natural", lambda size: True)
    report = workflow.optimize(
        Called(lambda _, x: halved(x)).eval(), [torch.randn(2, 3, 8)], budget_s=0.2, out=tmp_path / "out"
    )
    assert report.rows[0].status == "failed" and "answers differently" in (report.rows[0].reason or "")
