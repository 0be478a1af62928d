"""Records in an LMDB, as the page of training reads them: each once, bit for bit, whichever processes read them."""

import importlib
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.docs.execution import PAGES
from tests.docs.pages import blocks
from tests.slow import but_slowly

COUNT = 13


@pytest.mark.parametrize("way", but_slowly([(0, None), (2, "fork"), (2, "spawn")], [(2, "spawn")]), ids=str)
def test_workers_read_each_once_bit_for_bit(
    way: tuple[int, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = (block.text for block in blocks(PAGES / "howto/training.md", PAGES) if block.file == "records.py")
    (tmp_path / "records.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of processes that are spawned
    records = importlib.import_module("records")
    samples = [(torch.randn(3, 5), torch.tensor(place)) for place in range(COUNT)]
    records.pack(samples, str(tmp_path / "data"))
    data = records.Records(str(tmp_path / "data"))
    assert len(data) == COUNT and torch.equal(data[4][0], samples[4][0])  # opened here: workers inherit it
    for _ in range(2):
        loader = DataLoader(data, 4, num_workers=way[0], multiprocessing_context=way[1])
        read = [torch.cat(part) for part in zip(*loader, strict=True)]
        assert torch.equal(read[0], torch.stack([x for x, _ in samples]))
        assert read[1].tolist() == list(range(COUNT))
