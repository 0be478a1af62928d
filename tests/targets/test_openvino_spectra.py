"""Fourier transforms on OpenVINO: every axis, halves of real ones, frames; at two batch sizes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optimize

WINDOW = torch.hann_window(8)
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "last axis": lambda x: torch.fft.fft(x, dim=2).real,
    "axis 1": lambda x: torch.fft.fft(x, dim=1).imag,
    "both": lambda x: torch.fft.fftn(x, dim=(1, 2)).real,
    "back": lambda x: torch.view_as_real(torch.fft.ifft(torch.complex(x, 2 * x), dim=2)),
    "half": lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1)),
    "half of the last": lambda x: torch.fft.rfft(x, dim=2).abs(),
    "back from half": lambda x: torch.fft.irfft(torch.complex(x, 2 * x), dim=2),
    "back from half, odd": lambda x: torch.fft.irfft(torch.complex(x, 2 * x), n=9, dim=1),
    "there and back": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, dim=1),
    "frames": lambda x: torch.view_as_real(torch.stft(x.flatten(1), 8, 4, window=WINDOW, return_complex=True)),
    "frames of all": lambda x: torch.view_as_real(
        torch.stft(x.flatten(1), 8, 3, center=False, onesided=False, return_complex=True)
    ),
}


class Transform(nn.Module):
    """A transform behind a layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.line, self.transform = nn.Linear(8, 8), TRANSFORMS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(self.line(x))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_answer_as_in_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Transform(name).eval()
    program = optimize.capture(net, (torch.randn(2, 5, 8),))
    runner = optimize.export(program, "openvino", tmp_path / "net.xml").load()
    for batch in (1, 3):
        x = torch.randn(batch, 5, 8)
        with torch.no_grad():
            torch.testing.assert_close(runner(x), net(x), rtol=1e-4, atol=1e-4)
