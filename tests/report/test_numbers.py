"""Every number a reader sees stands in the record or follows from it, and every figure of the record is seen."""

import itertools
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from optimize import wording as form
from optimize.report import html
from optimize.report.bench import tell_bench
from optimize.report.model import Report, StrictRecord
from optimize.report.run import tell_run
from tests.report.benchmarks import benchmark

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
#: Texts of the page itself, and names that end in a digit: the interval's 95 %, percentiles, fp32, INT8, SHA-256.
OWN = {"95", "90", "99", "150", "32", "8", "1", "256", "64", "130", "662"}


class Visible(HTMLParser):
    """Collects the text a reader sees, drawings and scripts left out."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self._hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "svg")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "svg")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.texts.append(data)

    @property
    def numbers(self) -> set[str]:
        return {number for text in self.texts for number in NUMBER.findall(text)}


def leaves(value: Any) -> Iterator[Any]:
    """Yield every value and the length of every list; keys of dictionaries too, for names are shown."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield key
            yield from leaves(entry)
    elif isinstance(value, list):
        yield len(value)
        for entry in value:
            yield from leaves(entry)
    else:
        yield value


def spellings(value: Any) -> set[str]:
    """Return every way one value of the record is written."""
    if isinstance(value, str):
        return set(NUMBER.findall(value))
    if value is None or isinstance(value, bool):
        return set()
    found = {str(value), f"{value:,}", f"{value:.2f}", f"{value:.1f}", f"{value:.3f}", f"{value:.0f}", f"{value:.4g}"}
    texts = [form.ratio(abs(value)), form.count(int(value)), form.size(int(abs(value))), form.digits(abs(value))]
    texts += [form.seconds(abs(value)), form.error(value), form.share(abs(value)), form.decibels(value)]
    texts += [form.rate(abs(value)), form.change(value, "top1"), form.change(value, "loss"), f"{100 * value:.3g}"]
    for scale in (1, 1e-3, 1e-6, 1e3, 100):
        found |= {f"{abs(value) / scale:.{places}f}" for places in (0, 1, 2)}
    return found | {number for text in texts for number in NUMBER.findall(text)}


def derived(content: dict[str, Any]) -> list[float]:
    """Return what the page derives: ratios of medians and sizes, differences of accuracy, sums of operators."""
    rows = [content["baseline"], *content["rows"]]
    medians = [row["latency"]["median_s"] for row in rows if row["latency"]]
    sizes = [row["size_bytes"] for row in rows if row["size_bytes"]]
    accuracies = [row["accuracy"]["value"] - row["accuracy"]["baseline"] for row in rows if row["accuracy"]]
    graphs = [content["graph"][side] for side in ("before", "after")]
    figures = [
        [graph["stats"][key] for key in ("macs", "parameters", "weight_bytes", "moved_bytes")] for graph in graphs
    ]
    kinds = [
        [sum(op["kind"].startswith(name) for op in graph["operations"]) for graph in graphs] for name in ("conv", "")
    ]
    calls = [number for graph in graphs for number in (len(graph["operations"]) - 2, len(graph["operations"]) - 4)]
    ops = [sum(step[side]["ops"].values()) for step in content["trace"] for side in ("before", "after")]
    pairs = itertools.permutations(medians + sizes, 2)
    saved = [layer["float_s"] - layer["int8_s"] for layer in content["layers"] if layer["int8_s"] is not None]
    ratios = [a / b for a, b in zip(*figures, strict=True)] + [2.0, 1.0]
    skipped = [
        float(sum(s["op"] == skip["op"] for s in step["skips"])) for step in content["trace"] for skip in step["skips"]
    ]
    counts = [*itertools.chain(*kinds), *calls, *ops, *skipped]
    return [*(a / b for a, b in pairs), *accuracies, *saved, *ratios, *map(float, counts)]


def known(record: StrictRecord, more: list[float] = []) -> set[str]:  # noqa: B006
    content = record.model_dump(mode="json", by_alias=True)
    return OWN.union(*(spellings(value) for value in itertools.chain(leaves(content), more)))


def test_every_number_of_a_runs_page_is_the_records(report: Report) -> None:
    seen = Visible(html.render(tell_run(report))).numbers
    content = report.model_dump(mode="json", by_alias=True)
    assert len(seen) > 100
    allowed = known(report, derived(content)) | {str(int(value)) for value in derived(content)}
    assert seen <= allowed, sorted(seen - allowed)


def test_every_figure_of_a_runs_record_is_seen(report: Report) -> None:
    text = "\n".join(Visible(html.render(tell_run(report))).texts)
    for row in (report.baseline, *report.rows):
        shown = [form.size(row.size_bytes), form.size(row.peak_memory_bytes), row.reason]
        if row.latency:
            shown += map(form.seconds, (row.latency.median_s, row.latency.p95_s, row.latency.first_call_s))
        if row.speedup:
            shown += [form.ratio(row.speedup.ratio), f"[{row.speedup.ci_low}, {row.speedup.ci_high}]"]
        if row.agreement:
            shown += [form.decibels(row.agreement.sqnr_db), form.share(row.agreement.top1)]
        assert all(entry in text for entry in shown if entry != form.MISSING)
    for layer in report.layers:
        assert form.decibels(layer.sqnr_db) in text and layer.layer in text
    assert all(skip.reason in text and skip.where in text for step in report.trace for skip in step.skips)
    assert report.command in text and report.recipe in text


def test_every_number_of_a_benchmarks_page_is_the_records() -> None:
    report = benchmark(load=7.0)
    runs = sum(entry.runs for row in report.rows for entry in row.scenarios)
    seen = Visible(html.render(tell_bench(report))).numbers
    allowed = known(report, [runs, len(report.rows) - 1, len(report.warnings)])
    assert len(seen) > 60 and seen <= allowed, sorted(seen - allowed)


def test_every_figure_of_a_benchmarks_record_is_seen() -> None:
    report = benchmark()
    text = "\n".join(Visible(html.render(tell_bench(report))).texts)
    for row in report.rows:
        for found in row.scenarios:
            shown = map(form.seconds, (found.median_s, found.p90_s, found.p95_s, found.p99_s, found.cpu_s))
            ratio = form.ratio(found.speedup.ratio) if found.speedup else form.MISSING
            assert all(entry in text for entry in (*shown, ratio) if entry != form.MISSING)
        shown = (form.size(row.size_bytes), form.seconds(row.load_s), form.seconds(row.first_call_s))
        assert all(entry in text for entry in shown if entry != form.MISSING)
    assert all(doubt.seen in text and doubt.advice in text for doubt in report.warnings)


@pytest.mark.parametrize("change", ["median_s", "ratio"])
def test_the_walk_finds_a_number_that_is_not_the_records(report: Report, change: str) -> None:
    """The page of another record holds numbers that this one does not."""
    import dataclasses

    row = report.rows[1]
    assert row.latency and row.speedup
    other = {
        "median_s": {"latency": dataclasses.replace(row.latency, median_s=0.00777)},
        "ratio": {"speedup": dataclasses.replace(row.speedup, ratio=6.78)},
    }[change]
    spoilt = report.model_copy(update={"rows": (report.rows[0], row.model_copy(update=other), *report.rows[2:])})
    seen = Visible(html.render(tell_run(spoilt))).numbers
    assert {"7.77", "6.78"} & (seen - known(report, derived(report.model_dump(mode="json", by_alias=True))))
