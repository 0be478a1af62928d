"""The process of one call: takes its rights away, runs one function of this package, and answers in JSON lines.

Run as ``python -m optimize.sandbox.child`` with the request, one line of JSON, on its standard input.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from optimize.errors import OptimizeError, as_fields, first_line, lacks_memory, spell
from optimize.sandbox.confine import ChildLimits, confine, confine_files, end_with_parent
from optimize.sandbox.process import relax_collector


def main() -> None:
    """Answer the one request on standard input."""
    end_with_parent()
    relax_collector()
    request = json.loads(sys.stdin.buffer.readline())
    # Native libraries print to file descriptor 1: the answers go to a private copy of it, the rest to 2.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        folder, limits = Path(request["folder"]), request["limits"]
        if limits:
            confine_files(folder)
        # What it imports comes before the limits, so that they measure the work.
        function = pkgutil.resolve_name(request["function"])
        missing = confine(ChildLimits(**limits)) if limits else []
        _say(answers, **_answered(function, folder, request["arguments"], missing, answers))


def _answered(
    function: Callable[..., Any], folder: Path, arguments: Mapping[str, Any], missing: list[str], answers: TextIO
) -> dict[str, Any]:
    def tell(phase: str, share: float) -> None:
        _say(answers, progress=[phase, share])

    try:
        return {"answer": function(folder=folder, tell=tell, **arguments), "missing": missing}
    except OptimizeError as error:
        return as_fields(error)
    except RecursionError:
        return {"error": "Refused", "what": "The file is nested too deeply to be read.", "hint": ""}
    except BaseException as error:  # a file that the function did not foresee; a panic of Rust is no Exception
        if lacks_memory(error):
            return {"error": "MemoryError", "what": first_line(error)[:300], "hint": ""}
        return {"error": "Unforeseen", "what": spell(error)[:300], "hint": "", "trace": traceback.format_exc()}


def _say(answers: TextIO, **message: Any) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
