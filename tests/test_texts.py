"""Texts from outside: what they say, and one clear refusal for each way to write a hostile one."""

import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimize import recipe
from optimize.cli.options import target_options
from optimize.errors import OptimizeError, Refused, UsageError
from optimize.gate import baseline, limits
from optimize.regular import require_file
from optimize.report.report_comparison import read_any
from optimize.texts import parse_yaml, read_json, read_toml, read_yaml

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
BAD_YAML = {
    "deep": ("[" * 5000, "nested deeper than 64 levels"),
    "deep mappings": ("{a: " * 70 + "}" * 70, "nested deeper than 64 levels"),
    "laughs": (LAUGHS, "more than 100000 values"),
    "merged laughs": (MERGED, "more than 100000 values"),
    "itself": ("a: &a [*a]", "what holds it"),
    "digits": (f"threads: {'9' * 5000}", "5000 digits"),
    "base 60": ("threads: !!int 1" + ":10" * 5000, "digits"),
    "twice": ("threads: 1\nthreads: 2", "'threads' stands there twice"),
    "NUL": ("a: \0", "not YAML"),
    "tag": ("a: !!python/object/apply:os.getcwd []", "not YAML"),
    "date": ("a: 2024-99-99", "not YAML"),
    "open": ("[1", "not YAML"),
    "documents": ("a: 1\n---\nb: 2", "not YAML"),
}
BAD_JSON = {
    "deep": ("[" * 100_000 + "]" * 100_000, "nested too deep"),
    "NaN": ('{"a": NaN}', "says NaN"),
    "infinity": ("[-Infinity]", "says -Infinity"),
    "infinite": ("[-1e999]", "says -1e999, which no float holds"),
    "digits": ("[" + "9" * 5000 + "]", "5000 digits"),
    "no float": ("[" + "9" * 400 + "]", "400 digits"),
    "twice": ('{"kind": 1, "kind": 2}', "'kind' stands there twice"),
    "open": ("{", "is not JSON"),
}


@pytest.mark.parametrize(("text", "message"), BAD_YAML.values(), ids=BAD_YAML)
def test_yaml_that_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    for read in (read_yaml, recipe.read, limits.read):
        with pytest.raises(UsageError, match=message):
            read(path)


@pytest.mark.parametrize(("text", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_json_that_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_any(path)
    with pytest.raises(Refused, match=message):
        baseline.read(path)


@pytest.mark.parametrize(
    "text", ["!!binary cmM=", "!!set {x}", "2001-01-01", "[{b: !!binary cmM=}]", "{? !!binary cmM= : 1}"]
)
def test_yaml_has_texts_numbers_lists_and_mappings_alone(text: str) -> None:
    """Bytes turned into a text behind the check that refuses names of Python code."""
    with pytest.raises(UsageError, match=r"is not YAML: a value of type (bytes|set|date)"):
        parse_yaml(f"a: {text}", source="it")


@pytest.mark.parametrize(
    "text", [f"a = {'9' * 5000}", f"a = [0x{'f' * 60}]", "a = " + "[" * 5000, "a = \0", "a = 1\na = 2"]
)
def test_toml_that_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(UsageError, match="is not TOML"):
        limits.read(tmp_path / "p.toml")


@pytest.mark.parametrize("text", ["tool = 3", "tool = []", "[tool]\noptimize = 'x'"])
def test_toml_of_another_kind_asks_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert limits.find(tmp_path) is None


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"a: \xff")
    for read in (read_yaml, read_json, read_toml):
        with pytest.raises(UsageError, match="not UTF-8 at byte 3"):
            read(tmp_path / "r")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "r").open("wb") as file:
        file.truncate(2**40)
    for read in (read_yaml, read_json, read_toml):
        with pytest.raises(Refused, match="at most"):
            read(tmp_path / "r")


def test_names_that_lead_to_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    names = {"fifo": "is a fifo", ".": "is a directory", "/dev/zero": "is a device", "none": "no file|No such file"}
    names |= {"a\0b": "holds a NUL", "a\udc80b": "is not UTF-8", "a" * 5000: r"too long"}
    for name, message in names.items():
        for read in (require_file, read_json, recipe.read, baseline.read):
            with pytest.raises(Refused, match=message) as caught:
                read(tmp_path / name)
            str(caught.value).encode("utf-8")
            assert len(caught.value.what) < 1000


def test_honest_texts(tmp_path: Path) -> None:
    text = "base: &base {threads: 2}\nother: {<<: *base, threads: 3}\nn: 0x10\ne: 1e3\non: pi\nno: off\n"
    expected = {"base": {"threads": 2}, "other": {"threads": 3}, "n": 16, "e": "1e3", "on": "pi", "no": False}
    assert parse_yaml(text, source="x") == expected
    assert parse_yaml("[2:4, -1:30, 1:30:00, 1:30.5, 0.5]", source="x") == ["2:4", "-1:30", "1:30:00", "1:30.5", 0.5]
    assert parse_yaml("", source="x") is None and parse_yaml("8.6,8.9", source="x") == "8.6,8.9"
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"a": [1, 2.5, null]}')
    assert read_json(tmp_path / "bom.json") == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    "text", ["=", "a", "=1", "a=1", ".a=1", "a.=1", "a.b.c=1", "a.b=[1", f"a.b={'9' * 5000}", "a.b=\0"]
)
def test_target_options_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--target-option"):
        target_options([text])


@given(st.text() | st.binary().map(lambda content: content.decode("latin-1")))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text, source="x")
    except OptimizeError as error:
        assert len(error.what) < 1000


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\uDFFF": 1}', '["\\ud83d"]'])
def test_half_a_character_is_no_text(text: str, tmp_path: Path) -> None:
    """It can be read, and written nowhere."""
    (tmp_path / "text").write_text(text)
    for read in (read_json, read_yaml):
        with pytest.raises(OptimizeError, match="surrogates not allowed"):
            read(tmp_path / "text")
    (tmp_path / "text").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "text") == {"a": "\U0001f600"}


def test_a_key_of_a_thousand_parts_is_not_taken_apart(tmp_path: Path) -> None:
    """The reader of TOML keeps each beginning of a dotted key: 120 kB took 20 GB."""
    path = tmp_path / "pyproject.toml"
    for key in ("a." * 60_000 + "a", '"a" . ' * 60_000 + "a"):
        path.write_text(f"[tool.optimize.check]\n{key} = 1\n")
        with pytest.raises(OptimizeError, match="a line has thousands of dots"):
            read_toml(path)
        path.write_text(f"[tool.optimize.check]\nx = {{{key} = 1}}\n")
        with pytest.raises(OptimizeError, match="a line has thousands of dots"):
            read_toml(path)
    pins = ", ".join(["'a==1.2.3'"] * 900)
    path.write_text(f"[tool.other]\ndependencies = [{pins}]\n")
    assert len(read_toml(path)["tool"]["other"]["dependencies"]) == 900


@pytest.mark.parametrize(
    ("text", "times", "noun"),
    [('{"":0}', 500_001, "keys"), ("[]", 1_000_001, "lists and mappings"), ("1", 4_000_002, "values")],
)
def test_json_of_nothing_but_structure_is_refused(text: str, times: int, noun: str, tmp_path: Path) -> None:
    """An empty mapping has two letters and sixty-four bytes."""
    (tmp_path / "report.json").write_text("[" + ",".join([text] * times) + "]")
    with pytest.raises(OptimizeError, match=f"it holds more than [0-9]* {noun}"):
        read_json(tmp_path / "report.json")


def test_json_is_no_longer_than_memory_holds_with_a_wide_letter(tmp_path: Path) -> None:
    """One letter beyond 16 bits makes a text four times as long: a report of 267 MB took 3 GB."""
    path = tmp_path / "report.json"
    path.write_text('["' + "a" * 2**23 + '\\ud83d\\ude00"]')
    tracemalloc.start()
    try:
        read_json(path)
        assert tracemalloc.get_traced_memory()[1] < 11 * path.stat().st_size
    finally:
        tracemalloc.stop()
    with path.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(OptimizeError, match="at most"):
        read_json(path)
