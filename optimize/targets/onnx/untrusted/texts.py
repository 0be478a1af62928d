"""Names that are no text: protobuf hands them on as bytes, and every reader of names takes them for text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from optimize.errors import Refused
from optimize.regular import shown


def check_texts(model: Message, path: Path) -> None:
    """Check that every name and text of a model is UTF-8.

    Raises:
        Refused: One is not.
    """
    waiting = [model]
    while waiting:
        for held, value in waiting.pop().ListFields():
            if held.message_type is not None:
                waiting += [value] if isinstance(value, Message) else value
            elif held.type == held.TYPE_STRING and any(isinstance(text, bytes) for text in _texts(value)):
                raise Refused(
                    f"'{shown(path)}' is not an ONNX file: a {held.name} in it is not UTF-8.",
                    hint="Write or download it again.",
                )


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str | bytes) else value
