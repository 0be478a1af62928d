"""Networks outside image classification that no package builds, small and as their papers draw them.

``benchmarks.any_model`` takes them; each says where it comes from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


def mlp(sizes: Sequence[int], *, last: bool = False) -> nn.Sequential:
    """Return linear layers of these sizes with ReLU between them, and behind the last one where ``last``."""
    layers: list[nn.Module] = []
    for place, (before, after) in enumerate(itertools.pairwise(sizes), 2):
        layers += [nn.Linear(before, after), *([nn.ReLU()] if last or place < len(sizes) else [])]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """M. Naumov et al., "Deep Learning Recommendation Model", 2019, arXiv 1906.00091: bags of embeddings, crossed."""

    def __init__(self, tables: int = 8, rows: int = 1000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom, crossed = mlp((13, 128, width), last=True), (tables + 1) * tables // 2
        self.top = mlp((width + crossed, 128, 64, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Take ``[N, 13]`` numbers and ``[N, tables, bag]`` ids."""
        low = self.bottom(dense)
        rows = torch.stack([low, *(table(sparse[:, at]) for at, table in enumerate(self.tables))], 1)
        crossed = rows @ rows.transpose(1, 2)
        return torch.sigmoid(self.top(torch.cat([low, crossed[:, self.pairs[0], self.pairs[1]]], 1)))


class DeepFM(nn.Module):
    """H. Guo et al., "DeepFM", 2017, arXiv 1703.04247: a factorization machine and an MLP on one embedding."""

    def __init__(self, fields: int = 26, rows: int = 2000, width: int = 16) -> None:
        super().__init__()
        self.first, self.table = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        self.deep = mlp((fields * width, 128, 128, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Take ``[N, fields]`` ids."""
        rows = self.table(ids)
        machine = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.first(ids).sum(1) + machine + self.deep(rows.flatten(1)))


class WideAndDeep(nn.Module):
    """H.-T. Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016, arXiv 1606.07792."""

    def __init__(self, wide: int = 200, fields: int = 16, rows: int = 1000, width: int = 16) -> None:
        super().__init__()
        self.wide, self.table = nn.Linear(wide, 1), nn.Embedding(rows, width)
        self.deep = mlp((fields * width, 256, 128, 1))

    def forward(self, crossed: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Take ``[N, wide]`` crossed features and ``[N, fields]`` ids."""
        return torch.sigmoid(self.wide(crossed) + self.deep(self.table(ids).flatten(1)))


class NCF(nn.Module):
    """X. He et al., "Neural Collaborative Filtering", 2017, arXiv 1708.05031: products and an MLP of user and item."""

    def __init__(self, rows: int = 2000, width: int = 32) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(rows, 2 * width), nn.Embedding(rows, 2 * width)
        self.deep, self.head = mlp((2 * width, 128, 64, width), last=True), nn.Linear(2 * width, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Take ``[N]`` ids of users and of items."""
        (u, v), (w, x) = self.users(user).chunk(2, -1), self.items(item).chunk(2, -1)
        return torch.sigmoid(self.head(torch.cat([u * w, self.deep(torch.cat([v, x], -1))], -1)))


class SASRec(nn.Module):
    """W.-C. Kang and J. McAuley, "Self-Attentive Sequential Recommendation", 2018, arXiv 1808.09781."""

    def __init__(self, rows: int = 1000, width: int = 64, longest: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(rows, width), nn.Embedding(longest, width)
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks, self.norm = nn.TransformerEncoder(block, layers, enable_nested_tensor=False), nn.LayerNorm(width)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Take ``[N, T]`` ids; return the scores of all items behind the last, ``[N, rows]``."""
        length = items.shape[1]
        hidden = self.items(items) + self.places(torch.arange(length, device=items.device))
        ahead = torch.ones(length, length, dtype=torch.bool, device=items.device).triu(1)
        return self.norm(self.blocks(hidden, mask=ahead))[:, -1] @ self.items.weight.T


class Tagger(nn.Module):
    """A recurrent tagger; in both directions as Z. Huang et al., "Bidirectional LSTM-CRF", 2015, arXiv 1508.01991."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], *, both: bool = False, rows: int = 1000) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 64)
        self.cell, self.head = cell(64, 128, 2, batch_first=True, bidirectional=both), nn.Linear(128 * (1 + both), 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Take ``[N, T]`` ids."""
        return self.head(self.cell(self.table(ids))[0])


class Forecaster(nn.Module):
    """An LSTM over numbers that returns its forecast and, nested, its last state."""

    def __init__(self, inputs: int = 8, hidden: int = 64) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(inputs, hidden, batch_first=True), nn.Linear(hidden, 1)

    def forward(self, series: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Take ``[N, T, inputs]``."""
        hidden, state = self.cell(series)
        return self.head(hidden[:, -1]), state


class Seq2Seq(nn.Module):
    """D. Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align", 2014, arXiv 1409.0473."""

    def __init__(self, rows: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.decoder, self.bridge = nn.GRU(width, width, batch_first=True), nn.Linear(2 * width, width)
        self.query, self.key, self.energy = nn.Linear(width, width), nn.Linear(2 * width, width), nn.Linear(width, 1)
        self.head = nn.Linear(3 * width, rows)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Take ``[N, S]`` and ``[N, T]`` ids; return ``[N, T, rows]``."""
        memory, _ = self.encoder(self.source(source))
        start = torch.tanh(self.bridge(memory.mean(1)))
        hidden, _ = self.decoder(self.target(target), start[None])
        energy = self.energy(torch.tanh(self.query(hidden)[:, :, None] + self.key(memory)[:, None]))[..., 0]
        return self.head(torch.cat([hidden, energy.softmax(-1) @ memory], -1))


class TCN(nn.Module):
    """S. Bai et al., "An Empirical Evaluation of Generic Convolutional and Recurrent Networks", arXiv 1803.01271."""

    def __init__(self, inputs: int = 16, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        sizes = [inputs] + [width] * levels
        self.first = nn.ModuleList(nn.utils.parametrizations.weight_norm(
            nn.Conv1d(a, b, 3, dilation=2**i)) for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )  # fmt: skip
        self.skip, self.head = nn.Conv1d(inputs, width, 1), nn.Linear(width, 10)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        """Take ``[N, inputs, T]``."""
        hidden = series
        for level, conv in enumerate(self.first):
            before = self.skip(hidden) if level == 0 else hidden
            hidden = torch.relu(before + torch.relu(conv(nn.functional.pad(hidden, (2 * 2**level, 0)))))
        return self.head(hidden[:, :, -1])


class WaveNet(nn.Module):
    """A. van den Oord et al., "WaveNet", 2016, arXiv 1609.03499: gated dilated causal convolutions."""

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**level) for level in range(layers))
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 64, 1), nn.ReLU(), nn.Conv1d(64, 256, 1))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        """Take ``[N, 1, T]``."""
        hidden, skipped = self.start(wave), 0
        for level, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            filtered, opened = gate(nn.functional.pad(hidden, (2**level, 0))).chunk(2, 1)
            on, skip = mix(torch.tanh(filtered) * torch.sigmoid(opened)).chunk(2, 1)
            hidden, skipped = hidden + on, skipped + skip
        return self.head(skipped)


class CRNN(nn.Module):
    """B. Shi et al., "An End-to-End Trainable Neural Network for Image-based Sequence Recognition", 1507.05717."""

    def __init__(self, letters: int = 37) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, pool in ((1, 32, 2), (32, 64, 2), (64, 128, (2, 1)), (128, 128, (4, 1))):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers.append(nn.MaxPool2d(pool))
        self.features = nn.Sequential(*layers)
        self.cell, self.head = nn.LSTM(128, 64, 2, bidirectional=True), nn.Linear(128, letters)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Take ``[N, 1, 32, W]``; return ``[W / 4, N, letters]``."""
        hidden, _ = self.cell(self.features(image).squeeze(2).permute(2, 0, 1))
        return self.head(hidden).log_softmax(-1)


class PointNet(nn.Module):
    """C. R. Qi et al., "PointNet", 2016, arXiv 1612.00593, with its first transform."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        self.look, self.turn = _shared(3, 64, 128, 256), mlp((256, 128, 9))
        self.features, self.head = _shared(3, 64, 64, 128, 512), mlp((512, 256, 128, classes))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Take ``[N, 3, points]``."""
        turn = self.turn(self.look(points).amax(2)).reshape(-1, 3, 3) + torch.eye(3, device=points.device)
        return self.head(self.features(turn @ points).amax(2))


class DGCNN(nn.Module):
    """Y. Wang et al., "Dynamic Graph CNN", 2018, arXiv 1801.07829: two edge convolutions over nearest neighbours."""

    def __init__(self, classes: int = 40, near: int = 8) -> None:
        super().__init__()
        self.near = near
        self.edges = nn.ModuleList(_edge(2 * before, after) for before, after in ((3, 64), (64, 128)))
        self.head = mlp((192, 128, classes))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Take ``[N, 3, points]``."""
        found, hidden = [], points
        for edge in self.edges:
            hidden = edge(self._pairs(hidden)).amax(3)
            found.append(hidden)
        return self.head(torch.cat(found, 1).amax(2))

    def _pairs(self, x: torch.Tensor) -> torch.Tensor:
        squares = x.square().sum(1)
        distance = squares[:, :, None] + squares[:, None] - 2 * x.transpose(1, 2) @ x
        places = distance.topk(self.near, dim=2, largest=False).indices
        near = torch.gather(
            x[:, :, None].expand(-1, -1, x.shape[2], -1), 3, places[:, None].expand(-1, x.shape[1], -1, -1)
        )
        here = x[:, :, :, None].expand_as(near)
        return torch.cat([here, near - here], 1)


class GCN(nn.Module):
    """T. Kipf and M. Welling, "Semi-Supervised Classification with Graph Convolutional Networks", arXiv 1609.02907."""

    def __init__(self, features: int = 64, hidden: int = 128, classes: int = 7) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Take ``[N, nodes, features]`` and weights of edges ``[N, nodes, nodes]``."""
        joined = edges.abs() + torch.eye(edges.shape[1], device=edges.device)
        scale = joined.sum(-1).rsqrt()
        smoothed = scale[:, :, None] * joined * scale[:, None]
        return smoothed @ self.second(torch.relu(smoothed @ self.first(nodes)))


class EDSR(nn.Module):
    """B. Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution", 2017, arXiv 1707.02921."""

    def __init__(self, width: int = 32, blocks: int = 6, scale: int = 2) -> None:
        super().__init__()
        self.start, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.up = nn.Sequential(nn.Conv2d(width, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Take ``[N, 3, H, W]``."""
        start = self.start(image)
        hidden = start
        for block in self.blocks:
            hidden = hidden + 0.1 * block(hidden)
        return self.up(start + self.end(hidden))


def espcn(scale: int = 3) -> nn.Module:
    """Return W. Shi et al., "Real-Time Single Image Super-Resolution ... Sub-Pixel CNN", 2016, arXiv 1609.05158."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh(),
        nn.Conv2d(32, scale**2, 3, padding=1), nn.PixelShuffle(scale),
    )  # fmt: skip


def fsrcnn(scale: int = 2) -> nn.Module:
    """Return C. Dong et al., "Accelerating the Super-Resolution Convolutional Neural Network", arXiv 1608.00367."""
    mapping = [layer for _ in range(4) for layer in (nn.Conv2d(12, 12, 3, padding=1), nn.PReLU(12))]
    return nn.Sequential(
        nn.Conv2d(1, 56, 5, padding=2), nn.PReLU(56), nn.Conv2d(56, 12, 1), nn.PReLU(12), *mapping,
        nn.Conv2d(12, 56, 1), nn.PReLU(56), nn.ConvTranspose2d(56, 1, 9, scale, 4, scale - 1),
    )  # fmt: skip


class SimpleBaseline(nn.Module):
    """B. Xiao et al., "Simple Baselines for Human Pose Estimation", 2018, arXiv 1804.06208, on ResNet-18."""

    def __init__(self, joints: int = 17) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.backbone = nn.Sequential(*list(resnet18().children())[:-2])
        ups = [layer for before in (512, 128, 128) for layer in _up(before, 128)]
        self.head = nn.Sequential(*ups, nn.Conv2d(128, joints, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Take ``[N, 3, H, W]``; return heat maps ``[N, joints, H / 4, W / 4]``."""
        return self.head(self.backbone(image))


class SpectralNet(nn.Module):
    """A spectrogram by ``torch.stft`` and a convolution over it, as front ends of audio models are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(256), persistent=False)
        self.head = nn.Sequential(nn.Conv1d(129, 64, 3, padding=1), nn.ReLU(), nn.Conv1d(64, 10, 1))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        """Take ``[N, samples]``."""
        parts = torch.stft(wave, 256, 128, window=self.window, return_complex=True)
        return self.head(torch.log1p(torch.view_as_real(parts).square().sum(-1))).mean(-1)


def _up(before: int, after: int) -> tuple[nn.Module, ...]:
    return nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()


def _edge(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2))


def _shared(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers)
