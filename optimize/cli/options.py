"""Options that several commands share, and what follows from them."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

factory = click.option(
    "--model", "factory", metavar="PKG.MOD:FACTORY", help="Makes the module whose state dict MODEL holds."
)
trust = click.option("--trust", is_flag=True, help="Run the code that MODEL's pickles name. Only for files you made.")
quiet = click.option("--quiet", "-q", is_flag=True, help="No progress bars.")
mean = click.option("--mean", metavar="R,G,B", help="Mean of image folders, in [0, 1].  [default: ImageNet's]")
std = click.option("--std", metavar="R,G,B", help="Standard deviation of image folders.  [default: ImageNet's]")
input_shape = click.option(
    "--input-shape", metavar="C,H,W", help="Shape of one sample, such as 3,224,224; several inputs: 3,32,32;10:int64."
)


def preprocessing(options: dict[str, Any]) -> dict[str, str]:
    """Return the options that say how images become arrays, those that were given."""
    return {name: options[name] for name in ("mean", "std") if options[name]}


def command_line() -> str:
    """Return the command that is running, for reports: quoted, so that it can be pasted."""
    return shlex.join(["optimize", *sys.argv[1:]])


def fusing(*, fuse: bool, reparameterize: bool) -> list[dict[str, Any]]:
    """Return the exact passes in order.

    A BatchNorm in front of a sign becomes thresholds before another pass can fold it; one inside a branch is merged
    with its branch; what is left goes into the layer beside it.
    """
    asked = [(fuse, "FuseBNSign"), (reparameterize, "Reparameterize"), (fuse, "FuseConvBN")]
    return [{"name": name, "options": {}} for wanted, name in asked if wanted]
