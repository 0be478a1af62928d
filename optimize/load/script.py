"""TorchScript files: code for torch's own interpreter.

The interpreter cannot import Python, so a TorchScript file is opened without trust. It is not a sandbox: it has
operators that write and map files (``aten::save``, ``aten::from_file``), and code may run while the file is loaded. A
file whose code mentions one of those is refused without trust, by word, so that no spelling of a call gets by.
"""

from __future__ import annotations

import re
import warnings
from typing import IO

import torch

from optimize.errors import Refused

# torch writes getattr with the attribute in plain letters; in any other form it could spell one of the words unseen.
_REACHES_OUT = re.compile(
    rb"\b(save|from_file|read_file|write_file|c10d|dist_rpc|rpc_\w+"
    rb'|getattr(?!\((?:\([\w.]+\))?[\w.]*, "[\w.\- ]*"\)))\b'
)


def check(file: IO[bytes], name: str) -> None:
    """Refuse a TorchScript file whose code mentions an operator that reaches outside its tensors.

    Raises:
        Refused: The code mentions one; the word and the record are named.
    """
    reader = torch._C.PyTorchFileReader(file)
    for record in reader.get_all_records():
        if not (record.startswith("code/") and record.endswith(".py")):
            continue
        if found := _REACHES_OUT.search(reader.get_record(record)):
            raise Refused(
                f"'{name}' is a TorchScript file whose code mentions '{found[1].decode()}' ({record}), "
                "which can reach files or the network.",
                hint="Add --trust if you trust this file.",
            )


def read(file: IO[bytes]) -> torch.jit.ScriptModule:
    """Load a TorchScript file on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(file, map_location="cpu")
