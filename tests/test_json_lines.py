"""Texts as lines of JSON: tokens, masks and lengths beside what the tokenizer itself says, and what is refused."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from optimize import sandbox
from optimize.data import Batch, ImagePreprocessing, InputSpec, Samples, json_lines, open_data, open_texts
from optimize.data.json_lines import text_inputs
from optimize.data.sources import named_inputs
from optimize.datasets import example_inputs
from optimize.errors import OptimizeError, Refused, UsageError
from optimize.gate import limits
from optimize.load.capturing import Capturing, capture_model
from optimize.progress import silent
from optimize.recipe import parse
from optimize.report.model import Report
from optimize.sandbox import ChildLimits
from tests.test_cli import Typed, command

WORDS = ["[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(30)), "[PAD]"]
PAD = WORDS.index("[PAD]")
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[:, :, None].float()
        return self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))
"""


def tokenizer(folder: Path, **padding: Any) -> str:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    if padding:
        made.enable_padding(**padding)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def write_lookup(path: Path, table: np.ndarray) -> None:
    """Write a file that takes tokens ``[N, L]`` and answers the mean of their rows of a table."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("ReduceMean", ["rows"], ["y"], axes=[1], keepdims=0),
    ]
    taken = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "length"])
    given = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", table.shape[1]])
    graph = helper.make_graph(nodes, "lookup", [taken], [given], [numpy_helper.from_array(table, "table")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def lines(folder: Path, *entries: Any) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 12, count)
    return [
        {"text": " ".join(draws.choice(WORDS[3:-1], length)), "label": int(number)}
        for number, length in enumerate(lengths)
    ]


def specs(length: int | None, *names: str) -> list[InputSpec]:
    return [InputSpec(name, (length,), "int64") for name in names or ("input_ids", "attention_mask")]


def opened(path: Path, wanted: list[InputSpec], name: str, **more: Any) -> Samples:
    return open_data(path, inputs=wanted, image=ImagePreprocessing(tokenizer=name), **more)


def rows(batches: list[Batch]) -> dict[int, list[int]]:
    """Return the tokens of each text without padding, by its label."""
    found = {}
    for batch in batches:
        ids, mask, labels = *batch.inputs, batch.wanted
        assert labels is not None
        for line, kept, label in zip(ids, mask, labels, strict=True):
            assert bool((line[kept == 0] == PAD).all())
            found[int(label)] = line[kept == 1].tolist()
    return found


def test_a_fixed_length_pads_and_cuts_and_says_so(tmp_path: Path) -> None:
    entries, name = texts(50), tokenizer(tmp_path)
    data = opened(lines(tmp_path, *entries), specs(8), name, labelled=True)
    found = rows(list(data.batches(16)))
    own = Tokenizer.from_file(name)
    longer = sum(len(own.encode(entry["text"]).ids) > 8 for entry in entries)
    own.enable_truncation(8)
    assert found == {entry["label"]: own.encode(entry["text"]).ids for entry in entries} and data.count == 50
    assert 0 < longer < 50 and data.notes == (f"{longer} of 50 texts of 'texts.jsonl' were cut to 8 tokens.",)
    assert all(batch.inputs[0].shape[1] == 8 for batch in data.batches(16))


def test_a_free_length_is_the_longest_of_those_together(tmp_path: Path) -> None:
    entries, name = texts(300), tokenizer(tmp_path)
    data = opened(lines(tmp_path, *entries), specs(None), name, labelled=True)
    batches, own = list(data.batches(64)), Tokenizer.from_file(name)
    assert rows(batches) == {entry["label"]: own.encode(entry["text"]).ids for entry in entries} and not data.notes
    assert all(bool(batch.inputs[1].sum(0)[-1] > 0) for batch in batches)  # the longest fills its batch
    waste = sum(int((batch.inputs[1] == 0).sum()) for batch in batches) / sum(
        batch.inputs[1].numel() for batch in batches
    )
    assert waste < 0.1 and len({batch.inputs[0].shape[1] for batch in batches}) > 3


def test_without_a_mask_only_texts_of_one_length_go_together(tmp_path: Path) -> None:
    entries, name = texts(100), tokenizer(tmp_path)
    data = opened(lines(tmp_path, *entries), specs(None, "tokens"), name)
    batches = list(data.batches(64))
    assert sum(map(len, batches)) == 100 and not any(bool((batch.inputs[0] == PAD).any()) for batch in batches)


def test_pairs_have_types_and_the_tokenizer_says_its_padding(tmp_path: Path) -> None:
    name = tokenizer(tmp_path, direction="left", pad_id=0, pad_token="[UNK]")
    path = lines(tmp_path, {"text": "w1 w2", "text_pair": "w3"}, {"text": "w4", "text_pair": "w5 w6 w7"})
    wanted = specs(9, "token_type_ids", "input_ids", "attention_mask")
    (batch,) = opened(path, wanted, name).batches(4)
    own = Tokenizer.from_file(name).encode("w1 w2", "w3")
    types, ids, mask = (part[0].tolist() for part in batch.inputs)
    assert ids == [0] * 3 + own.ids and mask == [0] * 3 + [1] * 6 and types == [0] * 3 + own.type_ids
    assert batch.labels is None and 1 in own.type_ids


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ([1, 0], np.array([1, 0])),
        ([0.5, 2], np.array([0.5, 2.0])),
        ([[1, 2, 3], [4]], np.array([[1, 2, 3], [4, -1, -1]])),
        (["good", "bad"], np.array(["good", "bad"])),
    ],
)
def test_labels_are_what_a_metric_takes(tmp_path: Path, labels: list[Any], wanted: np.ndarray) -> None:
    path = lines(tmp_path, *({"text": "w1", "label": label} for label in labels))
    data = opened(path, specs(4), tokenizer(tmp_path), labelled=True, classes=False)
    (batch,) = data.batches(4)
    assert batch.wanted is not None and np.array_equal(batch.wanted, wanted)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"text": "w1"}\n{"txt": 1, "label": 2}', "Line 2 of .* has no text: it holds txt, label"),
        ('{"text": 3}', "Line 1 of .* has no text"),
        ('{"text": "w1"', "is not JSON"),
        ('{"text": "w1"}\n[]', "Line 2 of .* has no text"),
        ('{"text": "w1", "label": 1}\n{"text": "w2"}', "1 of the 2 lines .* have a label"),
        ('{"text": "w1", "label": 1}\n{"text": "w2", "label": "x"}', "not all numbers"),
        ('{"text": "w1", "label": {}}', "not all numbers"),
        ('{"text": "w1"}\n{"text": "\udcc3t\udce9"}', "Line 2 of .* is not UTF-8"),
    ],
)
def test_lines_that_hold_no_texts(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(Refused, match=match):
        opened(path, specs(4), tokenizer(tmp_path))


def test_what_texts_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = lines(tmp_path, {"text": "w1"}), tokenizer(tmp_path)
    with pytest.raises(UsageError, match=r"nothing says how they become tokens.*\n.*--tokenizer"):
        open_data(path, inputs=specs(4))
    with pytest.raises(UsageError, match=r'no labels.*\n.*line of JSON as "label",.* Without labels, --metric cosine'):
        opened(path, specs(4), name, labelled=True)
    for wanted in (
        [InputSpec("x", (3, 8, 8))],
        specs(4, "input_ids", "position_ids"),
        specs(4, "mask"),
        specs(2**30),
        [*specs(4), InputSpec("type_ids", (5,), "int64")],
    ):
        with pytest.raises(UsageError, match=r"[Tt]he model (takes|fixes)"):
            opened(path, wanted, name)
    (tmp_path / "broken.json").write_text("{}")
    for broken, match in (
        (tmp_path / "broken.json", "is no tokenizer that can be used"),
        (tmp_path / "none.json", "There is no file.*\nCheck the path"),
        ("none/tokenizer.json", "There is no file.*\nCheck the path"),
        (
            "owner/net-v2",
            r"not downloaded.*\n.*\ncurl -LO https://huggingface.co/owner/net-v2/resolve/main/tokenizer.json$",
        ),
    ):
        with pytest.raises(OptimizeError, match=match):
            opened(path, specs(4), str(broken))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"needs? the package tokenizers.*\npip install tokenizers"):
        json_lines.encode(tmp_path, silent, str(path), name, 4)


def changed(name: str, **parts: Any) -> str:
    """Give a tokenizer other parts, as whoever wrote it may."""
    Path(name).write_text(json.dumps({**json.loads(Path(name).read_text()), **parts}))
    return name


def limit(monkeypatch: pytest.MonkeyPatch, limits: ChildLimits) -> None:
    monkeypatch.setattr(sandbox, "ChildLimits", SimpleNamespace(of=lambda _: limits))


DOUBLING = {"type": "Replace", "pattern": {"String": "w"}, "content": "ww"}
TRUNCATION = {"max_length": 4, "stride": 4, "strategy": "LongestFirst", "direction": "Right"}


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"truncation": TRUNCATION}, r"'.*tokenizer\.json' is no tokenizer that can be used: .*"),  # Rust panics
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}}, "asks for more memory than it may have"),
    ],
)
def test_what_a_tokenizer_does_is_its_own_process(
    tmp_path: Path, parts: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, ChildLimits(1 << 29, 60.0, 120.0, 1 << 20))
    name = changed(tokenizer(tmp_path), **parts)
    with pytest.raises(Refused, match=match):
        opened(lines(tmp_path, {"text": "w1 w2 w3 w4 w5 w6"}), specs(None), name)


def test_a_tokenizer_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, ChildLimits(1 << 30, 1.0, 20.0, 1 << 20))
    name = changed(tokenizer(tmp_path), normalizer={"type": "Sequence", "normalizers": [DOUBLING] * 24})
    with pytest.raises(OptimizeError, match="was still not open after 1 s of computing"):
        opened(lines(tmp_path, *[{"text": "w1"}] * 1000), specs(None), name)


def test_rows_times_the_longest_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, entries = tokenizer(tmp_path), [*texts(60), {"text": "w1 " * 300, "label": 0}]
    monkeypatch.setattr(json_lines, "_MOST_TOGETHER", 310)
    for wanted in (specs(None), specs(100)):
        chunks = list(opened(lines(tmp_path, *entries), wanted, name).chunks())
        assert sum(map(len, chunks)) == 61 and all(chunk.inputs[0].numel() <= 310 for chunk in chunks)
    for label in ("x" * 6000, [1] * 6000):
        entries = [{"text": "w1", "label": label[:1]}] * 6000 + [{"text": "w1", "label": label}]
        with pytest.raises(Refused, match="has 6,001 labels, one of them 6,000 long"):
            opened(lines(tmp_path, *entries), specs(4), name)
    path = lines(tmp_path, {"text": "w1", "label": ["x" * 200_000, *["y"] * 1000]})
    with pytest.raises(Refused, match="has 1 labels, one of them 1,001 long"):
        opened(path, specs(None), tokenizer(tmp_path))
    for bound, match in (("_MOST_VALUES", "all of them 100"), ("_LONGEST", "may have 100 tokens")):
        with monkeypatch.context() as patched, pytest.raises(Refused, match=match):
            patched.setattr(json_lines, bound, 100)
            json_lines.encode(tmp_path, silent, str(lines(tmp_path, {"text": "w1 " * 300})), name, None)


def test_a_tokenizer_draws_nothing(tmp_path: Path) -> None:
    """BPE leaves out merges at random where its file asks for that, as training does."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "abab": 3}, [("a", "b"), ("ab", "ab")], dropout=0.5))
    made.save(str(tmp_path / "bpe.json"))
    found = opened(lines(tmp_path, {"text": "ab" * 200}), specs(None, "input_ids"), str(tmp_path / "bpe.json"))
    assert next(found.chunks()).inputs[0].tolist() == [[3] * 100]


def test_what_the_process_leaves_is_held_against_itself(tmp_path: Path) -> None:
    good = {"ids": np.ones(3, np.uint32), "type_ids": np.ones(3, np.uint32), "lengths": np.array([1, 2])}
    wrong = {"ids": np.ones(2, np.uint32), "lengths": np.array([4, -1]), "type_ids": np.ones(3), "labels": np.ones(3)}
    for name, array in wrong.items():
        np.savez(tmp_path / "texts.npz", **{**good, name: array})
        with pytest.raises(Refused, match="do not fit each other"):
            json_lines._left(tmp_path, None)
    np.savez(tmp_path / "texts.npz", **good)
    assert json_lines._left(tmp_path, None)[2].tolist() == [0, 1, 3]


def test_a_tokenizer_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    tokenizer(tmp_path)
    content = {"cases": [{"eval": "e.jsonl", "preprocess": {"tokenizer": "tokenizer.json"}}]}
    (case,) = limits.settings(content, given={}, source="here").cases
    assert limits.located(case, tmp_path).preprocess == {"tokenizer": str(tmp_path / "tokenizer.json")}


def test_the_line_from_texts_to_a_file(tmp_path: Path, typed: Typed) -> None:
    tokenizer(tmp_path)
    (tmp_path / "net_of_texts.py").write_text(NET)
    lines(tmp_path, *({**entry, "label": entry["label"] % 2} for entry in texts(60)))
    words = ("net_of_texts:Net", "--input-shape", "8:int64;8:int64", "--calib", "texts.jsonl", "--eval", "texts.jsonl")
    done = typed(*words, "--tokenizer", "tokenizer.json", "--to", "onnx", "--out", "out", "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    (row,) = report.rows
    assert row.accuracy is not None and row.accuracy.samples == 60 and row.accuracy.lost == 0
    assert any("were cut to 8 tokens" in text for text in report.warnings)
    assert "tokenizer: tokenizer.json" in (tmp_path / "out" / "recipe.yaml").read_text()


def test_compare_reads_texts_where_it_runs_the_files(tmp_path: Path, typed: Typed) -> None:
    """That process is confined: the tokenizer runs in it too, for it starts no other."""
    model, name, path = tmp_path / "model.onnx", tokenizer(tmp_path), lines(tmp_path, *texts(5))
    write_lookup(model, np.eye(len(WORDS), 4, dtype=np.float32))
    done = command("compare", model, model, "--data", path, "--tokenizer", name)
    assert done.returncode == 0 and "5 samples of" in done.stdout and "equal" in done.stdout, done.stderr
    done = typed("compare", model, model, "--data", path, "--tokenizer", changed(name, model={}))
    assert done.returncode == 1 and "is no tokenizer that can be used" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "takes, pairs, wanted",
    [
        ({}, True, ["input_ids"]),
        ({"x": False}, False, ["x"]),
        ({"input_ids": True, "attention_mask": True, "token_type_ids": True, "position_ids": True}, False, 2),
        ({"input_ids": True, "attention_mask": True, "token_type_ids": True, "position_ids": True}, True, 3),
        ({"input_ids": False, "attention_mask": False, "token_type_ids": False}, False, 3),
        ({"input_ids": True, "attention_mask": True, "head_mask": True}, False, 2),
        ({"input_ids": True, "past": True, "attention_mask": True}, False, 1),
    ],
)
def test_what_a_model_takes_of_texts(takes: dict[str, bool], pairs: bool, wanted: Any, tmp_path: Path) -> None:
    pair = {"text_pair": "w3"} if pairs else {}
    path = lines(tmp_path, {"text": "w1 w2"}, {"text": "w4", **pair})
    image = ImagePreprocessing(tokenizer=str(tokenizer(tmp_path)))
    found = next(open_texts(str(path), image, takes).chunks())
    names = wanted if isinstance(wanted, list) else list(takes)[:wanted]
    assert len(found.inputs) == len(names)
    assert [spec.name for spec in text_inputs(takes)][: len(names)] == names


class Masked(nn.Module):
    """As models of a hub have it: what they can do without has no value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 4)

    def forward(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, past: Any = None
    ) -> torch.Tensor:
        values: torch.Tensor = self.embed(input_ids)
        return values.sum(1) if attention_mask is None else (values * attention_mask[:, :, None]).sum(1)


def test_a_mask_that_a_model_can_do_without_is_an_input_of_the_file(tmp_path: Path) -> None:
    name, path = tokenizer(tmp_path), lines(tmp_path, *texts(5))
    recipe = parse({"preprocess": {"tokenizer": name}, "calib": str(path), "dynamic": "n"}, source="here")
    held = capture_model(Masked().eval(), partial(example_inputs, recipe), Capturing(dynamic=recipe.dynamic))
    assert held.input_names == ("input_ids", "attention_mask")


def test_arrays_that_bear_the_names_of_arguments_say_what_a_model_takes(tmp_path: Path) -> None:
    path, tokens = tmp_path / "texts.npz", np.arange(40).reshape(5, 8)
    np.savez(path, y=np.arange(5), attention_mask=tokens > 2, input_ids=tokens.astype(np.int32))
    recipe = parse({"calib": str(path)}, source="here")
    held = capture_model(Masked().eval(), partial(example_inputs, recipe), Capturing())
    assert held.input_names == ("input_ids", "attention_mask")
    assert [value.dtype for value in held.inputs] == [torch.int32, torch.bool]
    assert "The files take 8 tokens, neither more nor fewer: --dynamic sequence" in held.notes[-1]
    how = Capturing(dynamic={name: {1: "n"} for name in held.input_names})
    free = capture_model(Masked().eval(), partial(example_inputs, recipe), how)
    assert "tokens, neither" not in " ".join(free.notes)

    assert named_inputs(path, {"input_ids": False, "type_ids": False}) == []
    assert named_inputs(path, {"x": False, "input_ids": True, "attention_mask": True}) == []
    names = [spec.name for spec in named_inputs(path, {"input_ids": False, "attention_mask": True, "past": True})]
    assert names == ["input_ids", "attention_mask"]
    assert [spec.dtype for spec in named_inputs(path, {"input_ids": False, "past": True})] == ["int32"]
    np.savez(path, x=tokens, features=tokens / 2)
    assert named_inputs(path, {"x": False}) == named_inputs(path, {"features": False}) == []
