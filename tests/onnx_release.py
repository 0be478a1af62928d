"""ONNX Runtime as its releases lie on a disk, for programs in C++: the library of its Python package, and headers."""

import importlib.util
from pathlib import Path

HEADERS = Path(__file__).parent / "targets" / "headers"
#: What a compiler needs behind a program, from the folder that has the release.
FLAGS = (
    *("-I", "onnxruntime/include", "-L", "onnxruntime/lib", "-lonnxruntime"),
    "-Wl,-rpath,$ORIGIN/onnxruntime/lib",
)


def lay(folder: Path) -> None:
    """Lay ``onnxruntime/include`` and ``onnxruntime/lib`` into a folder, as links."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    (library,) = (Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*")
    (folder / "onnxruntime" / "lib").mkdir(parents=True)
    (folder / "onnxruntime" / "include").symlink_to(HEADERS)
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / "onnxruntime" / "lib" / name).symlink_to(library)
