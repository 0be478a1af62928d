"""The child process of a rehearsal: limits itself, opens one file, says how it went."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from optimize.errors import OptimizeError
from optimize.load.identify import Kind
from optimize.load.untrusted import open_untrusted

_MARGIN_BYTES = 1 << 30
_TIMES_FILE = 6


def _limit(file_bytes: int, limit_s: int) -> None:
    """Limit this process (POSIX only; elsewhere the clock of the parent is the only limit)."""
    try:
        import resource
    except ImportError:
        return
    limits = {resource.RLIMIT_CPU: limit_s, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    statm = Path("/proc/self/statm")
    if statm.exists():
        present = int(statm.read_text().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = present + _TIMES_FILE * file_bytes + _MARGIN_BYTES
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (allowed, hard))


def main(path: str, name: str, kind: str, limit_s: str) -> None:
    """Open one file under limits and write the verdict, one line of JSON, to the standard output."""
    import torch  # what a load imports comes before the limits, so that they measure the file alone

    if Kind[kind] is Kind.EXPORTED:
        import torch.export.pt2_archive._package
    torch.set_num_threads(1)
    size = Path(path).stat().st_size
    _limit(size, int(limit_s))
    refused, hint = "", ""
    try:
        open_untrusted(Path(path), Kind[kind], name)
    except OptimizeError as error:
        refused, hint = error.what, error.hint
    except MemoryError:
        refused = f"'{name}' ({size} bytes) asks for more memory than {_TIMES_FILE} times its size and 1 GiB."
        hint = "Do not open this file, unless you know who made it and why it is so: then add --trust."
    sys.stdout.write("\n" + json.dumps({"refused": refused, "hint": hint}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
