"""LSTM that reads an image row by row and classifies it from the last hidden state.

Source: Felix A. Gers, Jürgen Schmidhuber, Fred Cummins, "Learning to Forget: Continual Prediction with LSTM", 2000,
Neural Computation 12(10); the cell with a forget gate as described by Klaus Greff, Rupesh K. Srivastava, Jan Koutník,
Bas R. Steunebrink, Jürgen Schmidhuber, "LSTM: A Search Space Odyssey", 2015, arXiv:1503.04069.
"""

from torch import Tensor, nn


class RowLSTM(nn.Module):
    """Classifies single-channel images as sequences: each row is one step, each pixel of it one feature.

    Args:
        columns: Width W of the image in pixels.
        classes: Number of logits.
        hidden: Width of the hidden state.
        layers: Number of stacked LSTM layers.
    """

    def __init__(self, columns: int, classes: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(columns, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images `[N, 1, H, W]` to logits `[N, classes]`."""
        states, _ = self.lstm(x.squeeze(1))
        return self.head(states[:, -1])


def lstm_tiny() -> RowLSTM:
    """Builds an LSTM for images `[N, 1, 28, 28]` and 10 classes."""
    return RowLSTM(columns=28, classes=10, hidden=64, layers=2)
