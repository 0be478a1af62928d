"""What ``optimize profile`` shows and writes, from one profile built by hand."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from optimize.errors import Refused
from optimize.measure.environment import Environment
from optimize.profile import artifacts
from optimize.profile.result import FreshProcess, KernelProfile, LiveMemory, Profile, PythonCost, PythonFunction
from optimize.report import PROFILE, charts, html
from optimize.report.charts import Drawn
from optimize.report.files import save
from optimize.report.profile import ProfileRecord, cards, chrome_trace, plot, tell_profile, write_trace
from tests.profile.nets import LIMITS
from tests.report.conftest import HOSTILE
from tests.report.test_golden import on_console

MACHINE = Environment(cpu="A CPU", cores=2, memory_bytes=None, system="Linux", python="3.11")


def kernel(name: str, seconds: float, **given: object) -> KernelProfile:
    values = {
        "op": "Conv", "layers": (name,), "serves": (), "nodes": (name,), "start_s": 0.0, "dtype": "float32",
        "macs": 1_000_000, "moved_bytes": 100_000, **given,
    }  # fmt: skip
    return KernelProfile(name=name, seconds=seconds, **values)  # type: ignore[arg-type]


@pytest.fixture
def record() -> ProfileRecord:
    kernels = (
        kernel("stem", 40e-6, layers=("stem.0", "stem.1")),
        kernel("reorder", 1e-6, op="Reorder", layers=(), serves=("stem.0",), nodes=(), macs=None, moved_bytes=None),
        kernel(HOSTILE, 5e-6, op="Add", macs=0, start_s=41e-6),
    )
    found = Profile(
        "onnx", 1, 1, 50e-6, "wall", 40, kernels, LIMITS,
        FreshProcess(0.5, 0.002, 60_000_000),
        LiveMemory(4096, "add", "body", 8192, {"add": 4096}),
        PythonCost(0.25, 60e-6, (PythonFunction("net.py:3 forward", 2.0, 5e-6, True),)),
    )  # fmt: skip
    return ProfileRecord(
        created="2026-01-01", command="optimize profile net.pt", source="net.pt", environment=MACHINE, found=found
    )


def shown(record: ProfileRecord, **given: bool) -> str:
    return on_console(tell_profile(record, **given), 160)


def test_the_table_names_all_modules_of_a_kernel_and_sums_up(record: ProfileRecord) -> None:
    text = shown(record)
    stem = next(line for line in text.splitlines() if "stem.0 + stem.1" in line)
    assert "40.0 µs" in stem and "80.00 %" in stem and "25.0 G" in stem and "50 %" in stem and "compute" in stem
    assert "Reorder for stem.0" in text and "4.00 µs  8.0 %" in text and "net.py:3 forward" in text
    assert [title for title, *_ in cards(record.found)] == [
        "End to end", "In layers", "Outside layers", "Work", "Activations", "Peak memory", "First call"
    ]  # fmt: skip


def test_an_overlap_with_noise_is_shown_below_zero(record: ProfileRecord) -> None:
    short = record.model_copy(
        update={"found": Profile(**{**vars(record.found), "total_s": 44e-6, "clock": "processor"})}
    )
    text = shown(short)
    assert "−2.00 µs" in text and "processor time" in text
    assert "104.55 % of the run" in text and "take longer under the profiler than in a run without it" in text
    assert "under the profiler" not in shown(record)


def test_more_than_the_roof_is_explained(record: ProfileRecord) -> None:
    fast = Profile(**{**vars(record.found), "kernels": (kernel("stem", 10e-6),)})
    text = shown(record.model_copy(update={"found": fast}))
    assert "200 %" in text and "More than 100 % of what arithmetic bounds is no error" in text and "caches" not in text
    assert "More than 100 %" not in shown(record)


def test_a_long_profile_is_cut_on_the_terminal_only(record: ProfileRecord) -> None:
    many = tuple(kernel(f"layer{index}", 1e-6 * (index + 1)) for index in range(60))
    long = record.model_copy(update={"found": Profile(**{**vars(record.found), "kernels": many})})
    assert "20 kernels that take 210 µs together" in shown(long) and "layer59" in shown(long)
    assert "together" not in shown(long, whole=True)
    assert html.render(tell_profile(long)).count('<th scope="row">layer') == 60


def test_the_page_escapes_names_and_asks_nothing_of_the_network(record: ProfileRecord) -> None:
    page = html.render(tell_profile(record))
    assert HOSTILE not in page and "http://" not in page and "https://" not in page
    assert page.count('<circle class="cloud') == 1 and "stem.0 + stem.1" in page


def test_the_roofline_is_a_picture_on_its_own(record: ProfileRecord) -> None:
    made = plot(record.found)
    assert made is not None
    root = ET.fromstring(html.render_picture(made, "net.pt"))
    tags = [child.tag.rpartition("}")[2] for child in root.iter()]
    assert tags.count("circle") == 1 and tags.count("path") == 3
    drawn = Drawn(made, charts.LARGE)
    (dot,) = [shape for shape in drawn.shapes if not shape.path]
    assert drawn.left <= dot.x <= drawn.right and "25.0 GMAC/s at 10.0 MAC/B" in dot.title
    assert plot(Profile(**{**vars(record.found), "kernels": ()})) is None


def test_what_is_written_reads_back(record: ProfileRecord, tmp_path: Path) -> None:
    page = save(tmp_path / "out", tell_profile(record), record, PROFILE)
    assert page.name == "profile.html" and (tmp_path / "out" / "roofline.svg").exists()
    assert ProfileRecord.model_validate_json((tmp_path / "out" / "profile.json").read_text()) == record


def test_the_trace_is_what_chrome_reads(record: ProfileRecord, tmp_path: Path) -> None:
    write_trace(record.found, "net.pt", tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(record.found, "net.pt")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "ph", "ts", "dur", "pid", "tid"} <= set(event) for event in events)
    assert [event["name"] for event in events][:3] == ["run", "stem.0 + stem.1", "Reorder for stem.0"]
    assert events[1]["dur"] == 40.0 and events[1]["args"]["macs"] == 1_000_000
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"total_s": 0}, "times"),
        ({"total_s": "nan"}, "times"),
        ({"seconds": -1.0}, "times"),
        ({"seconds": 5e-324}, "times"),
        ({"start_s": "inf"}, "times"),
        ({"macs": 10**400}, "times"),
        ({"moved_bytes": -1}, "times"),
        ({"kernels": "all"}, "gave no profile"),
    ],
)
def test_a_child_that_was_taken_over_tells_no_times_that_no_run_takes(
    change: dict[str, object], told: str, record: ProfileRecord
) -> None:
    """What such times come to, a rate or the end of an axis, is no number."""
    answer = TypeAdapter(Profile).dump_python(record.found, mode="json")
    honest = artifacts._read(answer, Path("m.onnx"))
    assert honest == record.found
    changed = change if "total_s" in change or "kernels" in change else {}
    kernels = [{**answer["kernels"][0], **change}, *answer["kernels"][1:]] if not changed else answer["kernels"]
    with pytest.raises(Refused, match=told):
        artifacts._read({**answer, "kernels": kernels, **changed}, Path("m.onnx"))


def test_a_kernel_shorter_than_the_clock_tells_has_no_rate() -> None:
    assert kernel("fast", 0.0).macs_per_s is None
