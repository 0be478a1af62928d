"""The pages in headless Chromium where there is one; their structure in any case."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from optimize.report import html
from optimize.report.bench import tell_bench
from optimize.report.model import Report
from optimize.report.run import tell_run
from tests.report.benchmarks import benchmark

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files")


def shot(page: Path, name: str, width: int, *flags: str) -> Image.Image:
    """Return a picture of a page; a frame gives it the width of a phone, which a window of Chromium does not have."""
    frame, picture = page.with_name(f"{name}.frame.html"), page.with_name(f"{name}.png")
    frame.write_text(
        f'<body style="margin:0"><iframe src="{page.name}" style="border:0;width:{width}px;height:1400px">'
    )
    command = [str(CHROMIUM), *FLAGS, *flags, f"--screenshot={picture}", f"--window-size={max(width, 600)},1400"]
    subprocess.run([*command, frame.as_uri()], capture_output=True, timeout=600, check=True)
    with Image.open(picture) as opened:
        return opened.convert("RGB").crop((0, 0, width, 1400))


def dom(page: Path, *flags: str) -> str:
    """Return the page as it stands after its scripts ran."""
    command = [str(CHROMIUM), *FLAGS, *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


@pytest.mark.parametrize("kind", ["run", pytest.param("bench", marks=pytest.mark.slow)])
def test_pages_fit_a_phone_and_the_dark(report: Report, kind: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(html.render(tell_run(report) if kind == "run" else tell_bench(benchmark())), encoding="utf-8")
    structure(page.read_text(encoding="utf-8"))
    if CHROMIUM is None:
        return
    light, phone = shot(page, "light", 1280), shot(page, "phone", 360)
    dark = shot(page, "dark", 1280, "--blink-settings=preferredColorScheme=0")
    corner = (2, 2)
    assert sum(light.getpixel(corner)) > 700 and sum(dark.getpixel(corner)) < 100
    for picture in (light, phone, dark):
        assert len(picture.getcolors(maxcolors=1 << 24) or ()) > 100  # something is drawn on it
    # The right margin of a phone's page is empty: nothing is wider than the screen.
    edge = [phone.getpixel((357, y)) for y in range(0, 1400, 7)]
    assert set(edge) == {phone.getpixel(corner)}


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to lay the page out")
@pytest.mark.parametrize("kind", ["run", "bench"])
def test_paper_shows_whole_tables_and_everything_unfolded(report: Report, kind: str, tmp_path: Path) -> None:
    """The rules for paper are tried on a screen of A4's width, where a script can ask for widths and heights."""
    page, told = tmp_path / "page.html", tell_run(report) if kind == "run" else tell_bench(benchmark())
    text = html.render(told)
    assert "h2, h3, figcaption" in text and "@page { size: A4" in text
    probe = """<script>
const held = [...document.querySelectorAll(".results, .drawing, pre, dl, th, td")];
const cut = held.filter(e => e.scrollWidth > e.clientWidth + 1);
const folded = [...document.querySelectorAll("details > :not(summary)")].filter(e => e.offsetHeight < 5);
document.title = `cut ${cut.length} folded ${folded.length} of ${document.querySelectorAll("table, details").length}`;
</script></body>"""
    text = text.replace("@media print", "@media all").replace("@media screen and", "@media not all and")
    page.write_text(text.replace("</body>", probe), encoding="utf-8")
    shown = re.findall(r"<title>cut (\d+) folded (\d+) of (\d+)", dom(page, "--window-size=703,1000"))
    assert [(cut, folded) for cut, folded, _ in shown] == [("0", "0")] and int(shown[0][2]) > 3


def structure(text: str) -> None:
    """Check what makes a page legible on a phone, in the dark, offline and by a screen reader."""
    assert text.lstrip().startswith("<!doctype html>") and '<html lang="en">' in text
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    assert "prefers-color-scheme: dark" in text and "max-width: 720px" in text
    drawings = re.findall(r"<svg[^>]*>", text)
    assert drawings and all('role="img"' in tag and "aria-label=" in tag for tag in drawings)
    assert text.count("data-copy=") >= 2 and 'id="command"' in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to run the page's script")
def test_the_script_runs_under_the_pages_own_policy(report: Report, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    probe = "<script>document.title = String(document.querySelectorAll('button[data-copy]').length)</script></body>"
    text = html.render(tell_run(report))
    page.write_text(text.replace("</body>", probe), encoding="utf-8")
    buttons = text.count("<button")
    assert buttons > 3 and f"<title>{buttons}</title>" in dom(page)
