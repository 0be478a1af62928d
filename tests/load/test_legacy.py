"""The rewriting of old files: the class stays, its record goes, and every text that is used again is still there."""

import io

import torch
from torch import nn

from optimize.load.pickles import opcodes, without_container_records


def old_file(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    return buffer


def operators(data: bytes) -> list[str]:
    return [op.name for which, (op, _, _) in opcodes(data) if which == 3]


def test_records_are_cut_and_shared_texts_survive() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    model = nn.Sequential()
    model.add_module("module", inner)  # the text 'module' is in each record too, and pickle writes it once
    model.home = nn.Linear.__module__
    file = old_file(model)
    rewritten = without_container_records(file).read()
    before, after = operators(file.getvalue()), operators(rewritten)
    assert before.count("BINPERSID") - after.count("BINPERSID") == 3  # Sequential, Linear, ReLU
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
        found = torch.load(io.BytesIO(rewritten), weights_only=True)
    x = torch.randn(4, 2)
    assert torch.equal(found(x), model(x)) and str(found) == str(model) and found.home == model.home


def test_file_without_records_is_left_alone() -> None:
    file = old_file({"a": torch.ones(3)})
    assert without_container_records(file) is file and file.tell() == 0


def test_what_is_no_pickle_is_left_alone() -> None:
    assert without_container_records(io.BytesIO(b"\x80\x02garbage")).read() == b"\x80\x02garbage"
    assert list(opcodes(b"not a pickle")) == []
