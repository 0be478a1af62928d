"""What honest work does in a child; it imports torch, which what else tests have done there can do without."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def work(folder: Path, tell: Callable[[str, float], None]) -> dict[str, Any]:
    """Do what honest work needs: threads, arithmetic, reading, its own folder."""
    (folder / "result").write_text("x")
    found: list[float] = []
    thread = threading.Thread(
        target=lambda: found.append(float(torch.ones(300, 300).matmul(torch.ones(300, 300)).sum()))
    )
    thread.start()
    thread.join()
    tell("half", 0.5)
    return {"sum": found[0], "read": len(Path(__file__).read_text()) > 0, "secrets": os.environ.get("SOME_API_TOKEN")}
