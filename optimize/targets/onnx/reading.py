"""The one door to an ONNX file that the user names: read and checked before a runtime or a parser of graphs sees it.

No library of custom operators is ever loaded: a node of an unknown domain ends in the runtime's own error.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from optimize.errors import Refused
from optimize.regular import read_bytes, require_file, shown
from optimize.targets.onnx.untrusted.calls import check_calls
from optimize.targets.onnx.untrusted.messages import check_messages, check_texts
from optimize.targets.onnx.untrusted.survey import check_work
from optimize.targets.onnx.untrusted.tensors import check_tensors

#: One protobuf message.
MOST_BYTES = 2**31 - 1


def read_checked(path: Path, *, trust: bool = False) -> onnx.ModelProto:
    """Return what a file holds, as :func:`files_of` does; weights outside it stay there."""
    return files_of(path, trust=trust)[0]


def files_of(path: Path, *, trust: bool = False) -> tuple[onnx.ModelProto, tuple[Path, ...]]:
    """Return what a file holds, and the files it consists of, ``path`` first.

    Args:
        trust: Take whatever time and memory the file asks for; everything else is checked all the same.

    Raises:
        Refused: It is no regular file, no ONNX model, names weights that are not its own or not there, or asks for
            more work or memory than an honest file does.
    """
    model = _parsed(path, trust)
    check_texts(model, path)
    outside = check_tensors(model, path)
    try:
        check_calls(model, path)
        if not trust:
            check_work(model, path)
    except RecursionError as error:
        raise Refused(
            f"'{shown(path)}' has functions and graphs too deep inside one another.", hint="Export the model again."
        ) from error
    return model, (path, *outside)


def _parsed(path: Path, trust: bool) -> onnx.ModelProto:
    require_file(path)
    model, content = onnx.ModelProto(), read_bytes(path, most_bytes=MOST_BYTES)
    if not trust:
        check_messages(content, path)
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's implementations have no common class
        raise Refused(
            f"'{shown(path)}' is not an ONNX file: {shown(str(error))}.", hint="Write or download it again."
        ) from error
    if not model.HasField("graph"):
        raise Refused(
            f"'{shown(path)}' is not an ONNX file: there is no graph in it.", hint="Write or download it again."
        )
    return model
