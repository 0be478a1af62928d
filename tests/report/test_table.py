"""What is derived from a report: best rows, headline, columns."""

from dataclasses import replace

import pytest

from optimize.measure.bound import BoundCheck
from optimize.measure.clock import Choice
from optimize.measure.runs import Clock, Speedup
from optimize.records import Skip
from optimize.report import artifacts
from optimize.report.assemble import _about_rows
from optimize.report.changes import grouped_skips
from optimize.report.document import Cell
from optimize.report.model import LayerFigures, Report
from optimize.report.run import tell_run


def test_best_float32_counts_the_baseline(report: Report) -> None:
    assert artifacts.best_float32(report) is report.rows[0]
    alone = report.model_copy(update={"rows": report.rows[1:]})
    assert artifacts.best_float32(alone) is alone.baseline
    assert artifacts.over_best_float32(report, report.rows[1]) == 0.00451 / 0.00132
    assert artifacts.over_best_float32(report, report.rows[3]) is None


def test_in_processor_time_everything_is_compared_on_that_clock(report: Report) -> None:
    """On the wall the INT8 file is the fastest; in processor time, which decides, it takes twice the float file's."""
    choice, rows = Choice(Clock.CPU, "other work took the processor"), []
    for row, cpu_s, ratio in ((report.rows[0], 0.001, 10.0), (report.rows[1], 0.002, 5.0)):
        taken = replace(row.latency, clock=choice, cpu_s=cpu_s)  # type: ignore[type-var]
        rows.append(row.model_copy(update={"latency": taken, "speedup": Speedup(ratio, ratio, ratio)}))
    found = report.model_copy(update={"rows": tuple(rows)})
    assert artifacts.fastest(found) is artifacts.best_float32(found) is rows[0]
    assert artifacts.over_best_float32(found, rows[1]) == pytest.approx(0.5)
    assert any("2.00x slower than" in line for line in _about_rows(rows))
    assert not any("slower than" in line for line in _about_rows(report.rows[:2]))


def test_a_failed_row_is_never_the_best(report: Report) -> None:
    failed = report.rows[1].model_copy(update={"status": "failed", "reason": "outputs are not finite"})
    rows = (report.rows[0], failed)
    assert artifacts.fastest(report.model_copy(update={"rows": rows})) is report.rows[0]


def test_the_worst_output_is_named_where_outputs_differ(report: Report) -> None:
    def told(**levels: float) -> list[tuple[str, str]]:
        agreement = replace(report.rows[1].agreement, outputs=levels)  # type: ignore[type-var]
        row = report.rows[1].model_copy(update={"agreement": agreement})
        return list(artifacts.worst_outputs(report.model_copy(update={"rows": (row,)})))

    assert told() == told(boxes=30.0, scores=35.0) == []
    assert told(boxes=41.0, scores=21.5) == [
        ("onnx int8", "the worst of 2 outputs is 'scores' at 21.5 dB; 'boxes' at 41.0 dB")
    ]


def test_the_largest_output_is_a_class_where_labels_say_so(report: Report) -> None:
    """Of an embedding it means nothing, and nothing but the metric says whether an output is one."""

    def told(metric: str | None) -> dict[str, str]:
        scored = metric and replace(report.baseline.accuracy, metric=metric)  # type: ignore[type-var]
        baseline = report.baseline.model_copy(update={"accuracy": scored})
        found = artifacts.figures(report.model_copy(update={"baseline": baseline}), report.rows[1])
        return {name: str(cell.text) for name, cell in found.items()}

    assert told("top1")["Top-1 agreement"] == told(None)["Same largest output"] == "98.71 %"
    assert told("cosine")["Same largest output"] == "–" and "Top-1 agreement" not in told(None)


def test_headline(report: Report) -> None:
    found = {title: (cell.text, cell.detail) for title, cell in artifacts.cards(report)}
    assert found == {
        "Fastest artifact": ("onnx int8", "model.int8.onnx"),
        "Speed-up over eager": ("7.67×", "3.42× over best fp32"),
        "Smaller file": ("3.84×", "captured graph 11.2 MB → 2.91 MB"),
        "Accuracy change": ("−0.25 points", "[−0.46, −0.04] at 90.98 %, 10,000 samples"),
    }


def test_a_file_is_smaller_than_the_users_own(report: Report) -> None:
    model = report.model.model_copy(update={"size_bytes": 5_820_000})
    found = report.model_copy(update={"model": model, "files": ("nets/model.pt",)})
    assert dict(artifacts.cards(found))["Smaller file"] == Cell("2.00×", "model.pt 5.82 MB → 2.91 MB")


def test_the_fastest_is_held_against_others_alone_and_a_tie_is_said(report: Report) -> None:
    plain, integers, *_ = report.rows
    alone = report.model_copy(update={"rows": (plain,)})
    assert "the best float32" not in dict(artifacts.winner(alone))["Fastest"]
    assert dict(artifacts.cards(alone))["Speed-up over eager"].detail == "it is the best fp32"
    close = plain.model_copy(update={"speedup": replace(integers.speedup, ratio=7.5)})  # type: ignore[type-var]
    tied = report.model_copy(update={"rows": (close, integers)})
    wide = report.model_copy(update={"baseline": tied.baseline.model_copy(update={"precision": "float64"})})
    wide = wide.model_copy(update={"rows": [row.model_copy(update={"precision": "float64"}) for row in report.rows]})
    assert "the best float32" not in dict(artifacts.winner(wide))["Fastest"]
    (told,) = artifacts.winner(tied)
    assert told[1].endswith("model.int8.onnx; as fast, within the intervals: onnx float32")
    assert dict(artifacts.cards(tied))["Fastest artifact"].detail in told[1]
    assert "within the intervals" not in dict(artifacts.winner(report))["Fastest"]


def test_a_file_that_misses_what_was_asked_is_not_the_fastest(report: Report) -> None:
    plain, integers, *_ = report.rows
    missed = integers.model_copy(update={"bound": BoundCheck("at most 0.1 points lost", "−20 points", met=False)})
    assert artifacts.fastest(report) is integers
    assert artifacts.fastest(report.model_copy(update={"rows": (plain, missed)})) is plain


def test_headline_without_accuracy_speaks_of_agreement_and_without_rows_says_nothing(report: Report) -> None:
    row = report.rows[1].model_copy(update={"accuracy": None})
    assert artifacts.cards(report.model_copy(update={"rows": (row,)}))[-1][1].text == "34.6 dB"
    assert artifacts.cards(report.model_copy(update={"rows": report.rows[3:]})) == ()


def test_what_noise_does_not_judge_is_a_figure_and_no_verdict(report: Report) -> None:
    """INT8 that loses nothing stands at 0.5 dB on noise: it is called neither wrong nor near."""
    unjudged = replace(report.rows[1].agreement, sqnr_db=0.5, judged=False)  # type: ignore[type-var]
    row = report.rows[1].model_copy(update={"accuracy": None, "agreement": unjudged, "elsewhere": {}})
    found = report.model_copy(update={"rows": (report.rows[0], row)})
    cells = artifacts.figures(found, row)
    assert (cells["SQNR"].text, cells["SQNR"].detail, cells["SQNR"].tone) == ("not judged", "0.5 dB on noise", "")
    assert cells["Top-1 agreement"].is_missing and artifacts.fastest(found) is row
    assert artifacts.cards(found)[-1][1].text == "not judged" and artifacts.tradeoff(found) is None
    assert "not judged (0.5 dB on noise)" in repr(found) and not list(_about_rows((row,)))
    wrong = row.model_copy(update={"agreement": replace(unjudged, judged=True)})
    assert (
        "0.5 dB" in next(_about_rows((wrong,)))
        and artifacts.fastest(found.model_copy(update={"rows": (wrong,)})) is None
    )


def test_columns_without_a_figure_are_left_out(report: Report) -> None:
    assert "Accuracy" in artifacts.artifacts(report).columns
    rows = tuple(row.model_copy(update={"accuracy": None}) for row in report.rows)
    baseline = report.baseline.model_copy(update={"accuracy": None})
    assert "Accuracy" not in artifacts.artifacts(report.model_copy(update={"rows": rows, "baseline": baseline})).columns


def test_layers_of_one_fate_are_told_once(report: Report) -> None:
    def layer(name: str, more: float, row: str = "onnx int8", stays: str = "it is noise") -> LayerFigures:
        return LayerFigures(layer=name, op="conv2d", float_s=1e-6, int8_s=1e-6 + more, stays=stays, row=row)

    layers = (layer("a", 2e-6), layer("b", 3e-7), layer("c", 1e-6, "pt2 int8"), layer("d", 1e-6, stays="none tried it"))
    document = tell_run(report.model_copy(update={"layers": layers}))
    (told,) = (section.facts for section in document.sections if getattr(section, "title", "").startswith("Slower in"))
    assert told == (
        ("onnx int8 a, b; pt2 int8 c", "300 ns to 2.00 µs slower in INT8, and stay: it is noise"),
        ("onnx int8 d", "1.00 µs slower in INT8, and stays: none tried it"),
    )


def test_skips_are_grouped(report: Report) -> None:
    assert grouped_skips(report.trace[1].skips) == [("matmul", "has no constant operand", ("attn.0", "attn.1"))]
    reasons = ("is 3.1 % of 'a'", "is 12 % of 'a'", "is 800 µs", "is 2 ms", "is 'b'")
    found = {reason: places for _, reason, places in grouped_skips([Skip(text, "mul", text) for text in reasons])}
    assert found == {"is 3.1 % to 12 % of 'a'": reasons[:2], "is 800 µs to 2 ms": reasons[2:4], "is 'b'": reasons[4:]}
