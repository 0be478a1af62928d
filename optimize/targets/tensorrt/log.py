"""What TensorRT says while it works. It honours only a process's first logger, so there is one, and it is shared."""

from __future__ import annotations

from functools import cache
from typing import Any

_heard: dict[str, list[str]] = {"INTERNAL_ERROR": [], "ERROR": [], "WARNING": []}


def listen(module: Any) -> Any:
    """Forget what was said before; return the process's ``ILogger`` of ``tensorrt`` or ``tensorrt_rtx``."""
    for texts in _heard.values():
        texts.clear()
    return _logger(module)


def errors() -> list[str]:
    """Return the errors heard, the gravest first."""
    return [*_heard["INTERNAL_ERROR"], *_heard["ERROR"]]


def warnings() -> list[str]:
    """Return the distinct warnings heard, in order."""
    return list(dict.fromkeys(_heard["WARNING"]))


@cache
def _logger(module: Any) -> Any:
    class _Logger(module.ILogger):
        def log(self, severity: Any, text: str) -> None:
            if severity.name in _heard:
                _heard[severity.name].append(text)

    return _Logger()
