"""Files to load: ordinary ones, and ones that run a command when they are read carelessly."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize.load import Loaded, ModelSource, load_confined, load_trusted


class Net(nn.Module):
    """A module of our own, which a file may not bring along without trust."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


NET_OBJECT = Net()
NUMBER = 7


def raising() -> nn.Module:
    raise ValueError("no weights today")


def text() -> str:
    return "not a module"


def plain() -> nn.Sequential:
    """Return a network of torch's own classes, with an activation function as an attribute."""
    encoder = nn.TransformerEncoderLayer(4, 2, 8, activation=nn.functional.gelu, batch_first=True)
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(6, 4), encoder).eval()


class Command:
    """Pickles as a call of os.system that touches a marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


class Bomb:
    """Pickles as a request for 64 GiB."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (64 << 30,)


def rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """Copy a zip and pass each member through ``change(name, data)``."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info.filename)))
    return target


def described(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a .pt2 and edit its description in place."""

    def edit(name: str, data: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return data
        description = json.loads(data)
        change(description)
        return json.dumps(description).encode()

    return rewritten(source, target, edit)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(source: str | Path, *, model: str | None = None, trust: bool = False) -> Loaded:
    """Open a source in this process: by the rules of a confined one, or with trust."""
    named = ModelSource.of(source, model=model)
    return load_trusted(named) if trust else load_confined(named)
