"""Every metric of the table against a value computed by hand or by the field's own package."""

import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from optimize.cli import options
from optimize.errors import Refused, UsageError
from optimize.measure import detections
from optimize.measure.accuracy import Accuracy, AccuracyMeter
from optimize.measure.metrics import METRICS, find, own

DRAWS = np.random.default_rng(0)


def judged(
    name: str, outputs: np.ndarray | dict[str, np.ndarray], labels: np.ndarray | None, other: Any = None
) -> Accuracy:
    """Return what a metric says of a file, in batches of three, beside an original that answers as it does."""
    named = outputs if isinstance(outputs, dict) else {"y": outputs}
    expected = named if other is None else {"y": other}
    meter = AccuracyMeter(find(name))
    for start in range(0, len(next(iter(named.values()))), 3):
        part = slice(start, start + 3)
        cut = [{key: array[part] for key, array in side.items()} for side in (expected, named)]
        meter.update(*cut, None if labels is None else labels[part])
    found = meter.result()
    assert found is not None
    return found


def test_top5_is_torchs_topk() -> None:
    scores, labels = DRAWS.standard_normal((50, 12)).astype(np.float32), DRAWS.integers(0, 12, 50)
    within = (torch.from_numpy(scores).topk(5).indices == torch.from_numpy(labels)[:, None]).any(1)
    found = judged("top5", scores, labels)
    assert found.value == pytest.approx(within.float().mean().item()) and found.flips and found.unit == "%"
    ties = np.zeros((1, 12))
    assert [judged("top5", ties, np.array([label])).value for label in (4, 5)] == [1.0, 0.0]


@pytest.mark.parametrize("mapped", [False, True])
def test_miou_is_over_the_whole_set(mapped: bool) -> None:
    scores, labels = DRAWS.standard_normal((7, 4, 5, 6)), DRAWS.integers(0, 4, (7, 5, 6))
    labels[labels == 3] = 1  # no pixel is of class 3
    scores[:, 3] = -9
    labels[0, 0] = 255
    answers, valid = scores.argmax(1), labels != 255
    by_hand = [
        ((answers == name) & (labels == name) & valid).sum() / (((answers == name) | (labels == name)) & valid).sum()
        for name in range(3)
    ]
    found = judged("miou", answers if mapped else scores, labels)
    assert found.value == pytest.approx(np.mean(by_hand)) and found.lost is None
    assert found.low is not None and found.high is not None and found.low < found.value < found.high


def test_recall_is_by_the_nearest_others() -> None:
    vectors, labels = DRAWS.standard_normal((40, 5)), DRAWS.integers(0, 8, 40)
    labels[7] = 99  # nobody else has it
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = unit @ unit.T
    for k in (1, 3, 10):
        hits = []
        for place in (place for place in range(40) if (labels == labels[place]).sum() > 1):
            order = [other for other in np.argsort(-cosine[place]) if other != place][:k]
            hits.append(labels[place] in labels[order])
        found = judged(f"recall@{k}", 3 * vectors, labels)
        assert (found.value, found.samples) == (pytest.approx(np.mean(hits)), len(hits)) and found.flips


@pytest.mark.parametrize(("k", "classes"), [(20, 6), (1000, 6), (10, 2)])
def test_neighbours_that_hardly_anything_misses_are_refused(k: int, classes: int) -> None:
    labels = np.arange(60) % classes
    assert judged("recall@3", DRAWS.standard_normal((60, 5)), labels).value < 1.0
    with pytest.raises(Refused, match=r"by chance: take fewer"):
        judged(f"recall@{k}", DRAWS.standard_normal((60, 5)), labels)


def test_samples_without_a_label_are_not_counted() -> None:
    scores, labels = DRAWS.standard_normal((9, 3, 4, 4)), np.full((9, 4, 4), 255)
    labels[:2, 0, 0] = scores[:2].argmax(1)[:, 0, 0]
    found = judged("pixel_accuracy", scores, labels)
    assert (found.value, found.samples) == (1.0, 2)


def test_a_figure_that_shows_no_error_is_refused() -> None:
    numbers = DRAWS.random((10, 1))
    with pytest.raises(Refused, match="a cosine is the sign alone"):
        judged("cosine", numbers, numbers + 1)
    with pytest.raises(Refused, match=r"and white is 1e\+12, beside which no error is seen"):
        judged("psnr@1e12", numbers, numbers + 1)
    with pytest.raises(UsageError, match="lacks a number"):
        find("psnr@1e200")


def test_embeddings_that_are_all_alike_find_nothing() -> None:
    """However samples lie: those of a class may be neighbours there, and what comes first among equals is anybody's."""
    labels, alike = np.repeat(np.arange(8), 5), np.tile(DRAWS.standard_normal((1, 33)).astype(np.float32), (40, 1))
    assert judged("recall@5", alike, labels).value == 0.0
    assert judged("recall@5", alike + np.eye(8, 33, dtype=np.float32)[labels], labels).value == 1.0


def test_cosine_to_the_original() -> None:
    original, answers = DRAWS.standard_normal((2, 10, 4, 3)).astype(np.float32)
    found = judged("cosine", answers, None, original)
    by_torch = torch.cosine_similarity(*(torch.from_numpy(part).flatten(1) for part in (answers, original)), dim=1)
    assert found.value == pytest.approx(by_torch.mean().item(), abs=1e-6)
    assert (found.baseline, found.unit, found.beside_original) == (1.0, "", True)
    assert judged("cosine", np.zeros((3, 4)), np.zeros((3, 4))).value == 1.0
    assert judged("cosine", np.zeros((3, 4)), np.ones((3, 4))).value == 0.0


def test_psnr_by_hand() -> None:
    wanted = DRAWS.random((5, 3, 8, 8)).astype(np.float32)
    answers = wanted + DRAWS.normal(0, 0.02, wanted.shape)
    by_hand = [10 * np.log10(1 / np.square(one - other).mean()) for one, other in zip(answers, wanted, strict=True)]
    assert judged("psnr", answers, wanted).value == pytest.approx(np.mean(by_hand), abs=1e-3)
    assert judged("psnr@255", 255 * answers, 255 * wanted).value == pytest.approx(np.mean(by_hand), abs=1e-3)
    assert judged("psnr", wanted, wanted).value == 200.0
    with pytest.raises(Refused, match=r"white is 1: say psnr@255"):
        judged("psnr", 255 * answers, 255 * wanted)


def test_mae_leaves_nan_out_and_less_is_better() -> None:
    wanted = np.array([[1.0, np.nan], [3.0, 4.0]])
    found = judged("mae", np.array([[2.0, 7.0], [3.0, 6.0]]), wanted, other=np.array([[1.0, 0.0], [3.0, 4.0]]))
    assert (found.value, found.baseline, found.drop) == (1.0, 0.0, 1.0) and not found.higher_is_better
    assert judged("mae", np.ones((4, 1)), np.zeros(4)).value == 1.0
    with pytest.raises(Refused, match="the shapes differ"):
        judged("mae", np.ones((4, 2, 3)), np.ones((4, 3, 2)))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e200])
@pytest.mark.parametrize("name", ["cosine", "spearman", "psnr@1e50", "mae"])
def test_numbers_that_nothing_is_computed_from_are_refused(name: str, number: float) -> None:
    answers = np.arange(1.0, 4.0)[:, None]
    spoilt = np.where(answers == 2, number, answers)
    with pytest.raises(Refused, match=r"holds NaN|numbers of the output are not finite, or beyond"):
        judged(name, spoilt, answers)
    if name != "mae" or not np.isnan(number):
        with pytest.raises(Refused, match="numbers that are wanted are not finite, or beyond"):
            judged(name, answers, spoilt)


NOTHING = {
    "top1": ((2, 3), (2,)),
    "top5": ((2, 9), (2,)),
    "pixel_accuracy": ((2, 3, 4, 4), (2, 4, 4)),
    "miou": ((2, 3, 4, 4), (2, 4, 4)),
    "recall@1": ((2, 3), (2,)),
    "map": ((2, 5, 6), (2, 1, 5)),
    "wer": ((2, 5, 7), (2, 3)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_answers_that_are_no_numbers_are_no_proof(name: str) -> None:
    """NaN is the largest of scores, near everything and inside every box, unless somebody looks."""
    shape, labels = NOTHING[name]
    wanted = np.zeros(labels, np.float32 if name == "map" else np.int64)
    broken = {"y": np.full(shape, np.nan, np.float32)}
    with pytest.raises(Refused, match=r"NaN|not finite"):
        find(name).rows_of(broken, wanted)


@pytest.mark.parametrize("name", ["cosine", "psnr@1", "mae", "recall@1"])
def test_answers_of_nothing_are_no_proof(name: str) -> None:
    nothing = np.zeros((2, 0), np.float32)
    labels = np.zeros(2, np.int64) if name == "recall@1" else nothing
    with pytest.raises(Refused, match="no batch of real numbers"):
        find(name).rows_of({"y": nothing}, labels)
    with pytest.raises(Refused, match="No metric judges what the model answers"):
        AccuracyMeter(find("cosine")).update({"y": nothing}, {"y": nothing}, None)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", range(5))
def test_boxes_are_of_numbers(number: float, column: int) -> None:
    boxes = np.array([[[0, 0, 4, 4, 1]]], np.float32)
    found = np.array([[[0, 0, 4, 4, 0.9, 1]]], np.float32)
    broken, odd = boxes.copy(), found.copy()
    broken[..., column], odd[..., column + 1] = number, number
    for answer, wanted in ((found, broken), (odd, boxes)):
        with pytest.raises(Refused, match="are not finite"):
            find("map").rows_of({"y": answer}, wanted)


def test_boxes_are_of_no_more_classes_than_a_data_set_has() -> None:
    found = np.zeros((1, 1, 6), np.float32)
    wanted = np.zeros((1, 2500, 5), np.float32)
    wanted[0, :, 4] = np.arange(2500)
    with pytest.raises(Refused, match="boxes are of 2500 classes"):
        find("map").rows_of({"y": found}, wanted)
    meter = AccuracyMeter(find("map"))
    for part in np.split(wanted, 50, axis=1):
        meter.update({"y": found}, {"y": found}, part)
    with pytest.raises(Refused, match="map cannot be taken: boxes are of 2500 classes"):
        meter.result()


def test_maps_are_of_no_more_classes_than_a_data_set_has() -> None:
    with pytest.raises(Refused, match="maps are of 5000 classes"):
        find("miou").rows_of({"y": np.zeros((1, 5000, 1, 1), np.float32)}, np.zeros((1, 1, 1), np.int64))


def test_sentences_are_no_longer_than_can_be_laid_side_by_side() -> None:
    long = np.ones((1, 20_000), np.int64)
    with pytest.raises(Refused, match="more than 16384 tokens"):
        find("wer").rows_of({"y": long}, long)


def test_rows_that_outgrow_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimize.bounds.free_bytes", lambda: 16 * 200_000)
    meter, vectors = AccuracyMeter(find("recall@1")), np.random.default_rng(0).random((8, 1000), np.float32)
    with pytest.raises(Refused, match="'recall@1' keeps more of 16 samples than fits into the memory"):
        for _ in range(3):
            meter.update({"y": vectors}, {"y": vectors}, np.arange(8))


def test_spearman_shares_ranks() -> None:
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: 4.5 / sqrt(4.5 * 5).
    found = judged("spearman", np.array([[1.0], [2.0], [2.0], [4.0]]), np.array([10.0, 30.0, 20.0, 40.0]))
    assert found.value == pytest.approx(0.9486833)
    assert judged("spearman", np.ones(6), np.arange(6.0)).value == 0.0


def test_wer_is_jiwers() -> None:
    labels = np.array([[1, 2, 3, -1], [4, 4, -1, -1], [5, 6, 7, 8], [9, -1, -1, -1]])
    answers = np.array([[1, 3, 3, 2, -1], [4, -1, -1, -1, -1], [5, 6, 7, 8, 8], [-1, -1, -1, -1, -1]])
    texts = [[" ".join(str(word) for word in line if word >= 0) for line in part] for part in (labels, answers)]
    found = judged("wer", answers, labels)
    assert found.value == pytest.approx(jiwer.wer(*texts)) and found.unit == "%" and not found.higher_is_better


def test_wer_collapses_what_ctc_repeats() -> None:
    said = np.array([[0, 1, 1, 0, 1, 2, 2], [3, 3, 3, 3, 3, 3, 0]])  # 1 1 2 and 3
    labels = np.array([[1, 1, 2], [3, 0, 0]])
    assert judged("wer", np.eye(4)[said], labels).value == 0.0
    assert judged("wer@3", np.eye(4)[said], np.array([[0, 1, 0, 1, 2], [0, -1, -1, -1, -1]])).value == 0.0


def boxes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return detections ``[count, 12, 6]`` and labels ``[count, 5, 5]`` with some of each that are only padding."""
    draws = np.random.default_rng(seed)
    corner, size = draws.uniform(0, 50, (count, 5, 2)), draws.uniform(10, 40, (count, 5, 2))
    classes = draws.integers(-1, 3, (count, 5, 1)).astype(float)
    labels = np.concatenate([corner, corner + size, classes], 2)
    near = np.repeat(labels, 3, axis=1)[:, :12]
    shifted = near[..., :4] + draws.normal(0, 3, (count, 12, 4))
    kinds = np.where(draws.random((count, 12, 1)) < 0.2, 0, near[..., 4:])
    return np.concatenate([shifted, draws.random((count, 12, 1)), kinds], 2), labels


def by_coco(found: np.ndarray, labels: np.ndarray) -> float:
    """Return what COCO's own code says of detections and labels."""
    sides = []
    for part, score in ((labels, None), (found, 4)):
        entries = [
            {"image_id": image, "category_id": int(box[-1]), "bbox": [*box[:2], *(box[2:4] - box[:2])], "iscrowd": 0,
             "area": float((box[2:4] - box[:2]).prod()), "score": 0.0 if score is None else float(box[score])}
            for image, lines in enumerate(part, 1) for box in lines if box[-1] >= 0
        ]  # fmt: skip
        made = COCO()
        made.dataset = {
            "images": [{"id": image + 1} for image in range(len(part))],
            "categories": [{"id": name} for name in range(3)],
            "annotations": [{**entry, "id": place} for place, entry in enumerate(entries, 1)],
        }
        sides.append(made)
    with contextlib.redirect_stdout(io.StringIO()):
        for side in sides:
            side.createIndex()
        told = COCOeval(*sides, "bbox")
        told.evaluate()
        told.accumulate()
        told.summarize()
    return float(told.stats[0])


def test_map_is_cocos() -> None:
    found, labels = boxes(20, 0)
    assert 0.05 < by_coco(found, labels) < 0.95
    assert judged("map", found, labels).value == pytest.approx(by_coco(found, labels), abs=1e-9)
    apart = {"kinds": found[..., 5].astype(np.int64), "scores": found[..., 4], "boxes": found[..., :4]}
    assert judged("map", apart, labels).value == judged("map", found, labels).value
    times = np.bincount(DRAWS.integers(20, size=20), minlength=20)
    drawn = [np.repeat(part, times, axis=0) for part in (found, labels)]
    rows = detections.matched({"y": found}, labels)
    assert detections.average_precision(rows)(times) == pytest.approx(by_coco(*drawn), abs=1e-9)


def test_map_of_nothing_found_and_nothing_wanted() -> None:
    found, labels = boxes(4, 1)
    nothing = found.copy()
    nothing[..., 5] = -1
    assert judged("map", nothing, labels).value == 0.0
    empty = labels.copy()
    empty[..., 4] = -1
    meter = AccuracyMeter(find("map"))
    meter.update({"y": found}, {"y": found}, empty)
    with pytest.raises(Refused, match="All labels are void for the metric 'map', so that nothing is judged"):
        meter.result()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("top-1", "no metric 'top-1'.\nDid you mean 'top1'"),
        ("recal@5", "Did you mean 'recall@k'"),
        ("recall", "lacks a number"),
        ("recall@0", "Write recall@5"),
        ("recall@1.5", "lacks a number"),
        ("recall@k", "lacks a number"),
        ("psnr@nan", "Write psnr@255"),
        ("top1@3", "no metric"),
        ("", "no metric"),
    ],
)
def test_what_is_no_metric(name: str, match: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(name)
    assert match in str(caught.value)


def test_a_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs jiwer, which is not installed.\npip install jiwer"):
        find("wer")


def test_a_function_of_the_user_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scoring.py").write_text("def always(outputs, labels):\n    return labels == labels\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = judged("scoring:always", np.zeros(4), np.zeros(4))
    assert (found.metric, found.value) == ("always", 1.0)
    with pytest.raises(Refused, match="cannot be called"):
        find("scoring:number")


def test_what_a_function_of_the_user_is_known_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place and its file; what was made where nobody can look is another one each time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = []
    for text in ("right", "right", "wrong"):
        (tmp_path / "known_by.py").write_text(f"def score(outputs, labels):\n    return {text}\n")
        sys.modules.pop("known_by", None)
        importlib.invalidate_caches()
        known.append(find("known_by:score").code)
    assert known[0] == known[1] != known[2] and find("top1").code == ""
    assert own(lambda outputs, labels: labels).code != own(lambda outputs, labels: labels).code


@pytest.mark.parametrize("name", ["top5", "miou", "map", "recall@2", "cosine", "spearman", "psnr", "mae", "wer"])
def test_labels_that_do_not_fit_name_what_would(name: str) -> None:
    with pytest.raises(Refused, match=f"cannot be scored by {name} against outputs y float64") as caught:
        judged(name, np.zeros((3, 2, 2, 2, 2)), np.zeros((3, 7)))
    assert caught.value.hint.startswith(f"{name} takes ")


def test_the_option_lists_every_metric() -> None:
    @options.metric
    def command() -> None: ...

    (option,) = command.__click_params__  # type: ignore[attr-defined]
    assert all(name in option.help for name in METRICS)
