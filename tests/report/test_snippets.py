"""The programs of a report: copied out of the page, run in fresh processes, compiled where there is a compiler."""

import ast
import contextlib
import html
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import optimize
from optimize.data import ImagePreprocessing, InputSpec
from optimize.data.preprocessing import read_words
from optimize.registry import find_target
from optimize.targets.base import TensorSpec
from optimize.targets.snippets import snippets
from tests import onnx_release

COMPILER = shutil.which("g++") or shutil.which("clang++")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
TARGETS = ("torchscript", "onnx", "openvino")


class TwoInputs(nn.Module):
    """An image and token numbers, two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.table = nn.Conv2d(3, 4, 3), nn.Embedding(10, 4)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        pooled = self.stem(image).mean((2, 3))
        return {"logits": pooled + self.table(tokens).mean(1), "pooled": pooled}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of a run and the programs of its page, by target and language."""
    out = tmp_path_factory.mktemp("run") / "out"
    inputs = (torch.rand(2, 3, 8, 8), torch.randint(0, 10, (2, 5)))
    optimize.optimize(TwoInputs().eval(), inputs, passes=[], targets=list(TARGETS), out=out)
    page = (out / "report.html").read_text(encoding="utf-8")
    found = re.findall(r'<pre id="(\w+)-float32-([\w+]+)">(.*?)</pre>', page, re.DOTALL)
    return out, {f"{target} {language}": html.unescape(text) for target, language, text in found}


def _run(words: list[str], folder: Path, **more: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_the_program_of_the_page_runs_its_file_alone(target: str, programs: tuple[Path, dict[str, str]]) -> None:
    out, found = programs
    text = found[f"{target} Python"]
    assert '"image": numpy.zeros((1, 3, 8, 8)' in text and "\"tokens\": numpy.zeros((1, 5), 'int64')" in text
    check = "\nimport sys\nassert 'optimize' not in sys.modules\n"
    shown = _run([sys.executable, "-P", "-W", "ignore", "-c", text + check], out)
    assert shown.splitlines() == ["logits float32 (1, 4)", "pooled float32 (1, 4)"]


def _flags(word: str) -> Iterator[str]:
    spec = importlib.util.find_spec("openvino")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    if word == "include":
        yield f"-I{folder / 'include'}"
    else:
        yield from (str(path) for path in sorted((folder / "libs").glob("libopenvino.so*"))[:1])
        yield f"-Wl,-rpath,{folder / 'libs'}"


@NEEDS_COMPILER
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs openvino, whose package has headers")
def test_the_program_in_c_answers_as_python_does_to_an_openvino_file(
    programs: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    out, found = programs
    last = 'get_shape() << "\\n"'
    assert last in found["openvino C++"]
    text = found["openvino C++"].replace(
        last, f'{last[:-5]}" " << request.get_output_tensor(at).data<float>()[3] << "\\n"'
    )
    (tmp_path / "run.cpp").write_text(text)
    words = [str(COMPILER), "-std=c++17", str(tmp_path / "run.cpp"), "-o", str(tmp_path / "run")]
    _run([*words, *_flags("include"), *_flags("libs")], tmp_path)
    answers = _answers(found["openvino Python"], out)
    lines = [line.split() for line in _run([str(tmp_path / "run")], out).splitlines()]
    assert [line[:2] for line in lines] == [[name, "[1,4]"] for name in answers]
    assert [float(line[2]) for line in lines] == pytest.approx([value[0, 3] for value in answers.values()], rel=1e-4)


def _answers(program: str, out: Path) -> dict[str, Any]:
    """Returns what the program in Python is answered, by the names of the outputs."""
    names: dict[str, Any] = {}
    with contextlib.chdir(out), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program, "<page>", "exec"), names)
    return dict(zip(("logits", "pooled"), names["f"](*names["inputs"].values()), strict=True))


@NEEDS_COMPILER
def test_the_program_in_c_answers_as_python_does_to_an_onnx_file(
    programs: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    out, found = programs
    onnx_release.lay(tmp_path)
    last = '" values\\n"'
    assert last in found["onnx C++"]
    text = found["onnx C++"].replace(last, '" values " << found[at].GetTensorData<float>()[3] << "\\n"')
    (tmp_path / "run.cpp").write_text(text)
    _run([str(COMPILER), "-std=c++17", "-Wall", "-Werror", "run.cpp", *onnx_release.FLAGS, "-o", "run"], tmp_path)
    answers = _answers(found["onnx Python"], out)
    lines = [line.split() for line in _run([str(tmp_path / "run")], out).splitlines()]
    assert [line[:3] for line in lines] == [[name, str(value.size), "values"] for name, value in answers.items()]
    assert [float(line[3]) for line in lines] == pytest.approx([value[0, 3] for value in answers.values()], rel=1e-4)


@pytest.mark.parametrize(
    ("said", "spec"),
    [
        ("resize=36 size=32", InputSpec("x", (3, 32, 32))),
        ("resize=50x40 size=32x24 order=bgr interpolation=nearest", InputSpec("x", (3, 32, 24), "float16")),
        ("resize=40 size=32 order=bgr", InputSpec("x", (3, 32, 32), "uint8")),
        ("mean=0.5 std=0.25 size=20", InputSpec("x", (1, 20, 20))),
        ("resize=36", InputSpec("x", (32, 32, 3), "uint8")),
    ],
)
def test_the_program_prepares_a_picture_as_the_run_did(said: str, spec: InputSpec) -> None:
    image, taken = ImagePreprocessing.read(read_words(said)), TensorSpec("x", ("N", *spec.shape), spec.dtype)
    size = image.size or (32, 32)
    text = dict(snippets(find_target("onnx"), "a.onnx", [taken], [], {}, image.text(size, pixels=spec.is_picture)))
    names: dict[str, Any] = {}
    exec(text["Python"].partition("path =")[0], names)
    pixels = np.random.default_rng(0).integers(0, 255, (61, 83, 3), np.uint8)
    for array in (pixels, pixels.transpose(1, 0, 2)):
        picture = Image.fromarray(array).convert("L" if 1 in spec.shape else "RGB")
        found, wanted = names["prepared"](picture), image.prepared(picture, size, spec)[None].numpy()
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert np.allclose(found, wanted, atol=1e-5 if spec.dtype == "float32" else 2e-3)
    assert '"x": prepared(Image.new(' in text["Python"]
    assert "prepared(" not in dict(snippets(find_target("onnx"), "a", [taken], [], {}, "nets:transform"))["Python"]


def test_names_are_quoted_and_what_numpy_lacks_has_no_program() -> None:
    hostile = TensorSpec('x"); import os  #', ("batch\nimport os", 3), "float32")
    made = dict(snippets(find_target("onnx"), 'a"\nimport os', [hostile], [hostile], {}, preprocess="size=8 mean=0.5"))
    nodes = [node for node in ast.walk(ast.parse(made["Python"])) if isinstance(node, ast.Import)]
    assert {alias.name for node in nodes for alias in node.names} == {"numpy", "onnxruntime"}
    assert "is a picture: size=8 mean=0.5" in made["Python"] and "prepared(" not in made["Python"]
    half = TensorSpec("x", (1, 3), "bfloat16")
    assert not dict(snippets(find_target("onnx"), "a.onnx", [half], [half], {}))
    assert not dict(snippets(find_target("tensorrt"), "a.engine", [hostile], [hostile], {}))
