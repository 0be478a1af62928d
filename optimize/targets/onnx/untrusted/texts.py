"""What every reader takes for granted: names that are text (protobuf hands on bytes), shapes that are short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from optimize.errors import Refused
from optimize.regular import shown
from optimize.targets.onnx.untrusted.statics import MOST_AXES


def check_texts(model: Message, path: Path) -> None:
    """Check that every name and text of a model is UTF-8, and that no shape has more dimensions than runtimes take.

    Raises:
        Refused: One is not, or has.
    """
    waiting = [model]
    while waiting:
        for held, value in waiting.pop().ListFields():
            if held.name in ("dim", "dims") and len(value) > MOST_AXES:
                raise Refused(f"'{shown(path)}' is refused: what has {len(value)} dimensions is no shape.")
            if held.message_type is not None:
                waiting += [value] if isinstance(value, Message) else value
            elif held.type == held.TYPE_STRING and any(isinstance(text, bytes) for text in _texts(value)):
                raise Refused(
                    f"'{shown(path)}' is not an ONNX file: a {held.name} in it is not UTF-8.",
                    hint="Write or download it again.",
                )


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str | bytes) else value
