"""Keep what calibration saw in a file, under a hash of the program and the data.

The file is a NumPy archive without pickles; one that is damaged, or that other weights or other data made, is not used.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from optimize.data.array_files import Members
from optimize.errors import Refused
from optimize.files import whole
from optimize.program import Program
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import Observations
from optimize.quantization.observers import COUNTED, SIDE, Statistics

_VERSION = f"3 {SIDE} {COUNTED}"
#: What reading a file that is not there, cut off or altered can raise.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def fingerprint(program: Program, batches: FlatBatches) -> str:
    """Return the SHA-256, hexadecimal, of the graph, its weights, the data, and this format."""
    digest = hashlib.sha256(f"{_VERSION} {torch.__version__}\n{program.text()}".encode())
    for tensor in (*program.graph_module.parameters(), *program.graph_module.buffers()):
        digest.update(_bytes(tensor.detach()))
    for batch in batches:
        for tensor in batch:
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def load(folder: Path, key: str) -> Observations | None:
    """Return the observations kept under a key, or None."""
    try:
        held = Members(_file(folder, key))
        return _read(json.loads(str(held["index"])), held["counts"])
    except (Refused, *_DAMAGED):
        return None


def save(folder: Path, key: str, observations: Observations) -> None:
    """Keep observations under a key; the folder is made.

    Raises:
        Refused: The folder cannot be written.
    """
    parts = (observations, *observations.halves)
    distinct = list({id(entry): entry for part in parts for entry in part.values.values()}.values())
    places = {id(entry): index for index, entry in enumerate(distinct)}
    index = {
        "parts": [[part.samples, {name: places[id(entry)] for name, entry in part.values.items()}] for part in parts],
        "statistics": [_record(entry) for entry in distinct],
    }
    with whole(_file(folder, key)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, index=json.dumps(index), counts=np.stack([entry.counts for entry in distinct]))


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.calibration.npz"


def _record(entry: Statistics) -> list[object]:
    sums = [str(entry.low_sum), str(entry.high_sum)]
    return [entry.low, entry.high, entry.samples, *sums, entry.exponent]


def _read(index: dict, counts: np.ndarray) -> Observations:
    found = []
    for row, (low, high, samples, low_sum, high_sum, exponent) in zip(counts, index["statistics"], strict=True):
        found.append(Statistics(low, high, samples, int(low_sum), int(high_sum), exponent, row))
    parts = [({name: found[place] for name, place in names.items()}, samples) for samples, names in index["parts"]]
    return Observations(*parts[0], tuple(Observations(*part) for part in parts[1:]))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
