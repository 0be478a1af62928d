"""How much may be asked for: counts that start processes or threads, and sizes that memory must hold.

The same bounds hold for options, recipes, configurations and Python callers. A bound is called with a number and
returns it, or raises ``ValueError`` with the sentence to show, which is how pydantic wants it and click is given it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from optimize.errors import Refused, UsageError
from optimize.escaping import shortened

#: Values in one input with all its samples: 4 GB in float32.
MAX_VALUES = 2**30
#: Operators that one run of a TorchScript file may execute, all turns of its loops and all calls counted, and what a
#: size of an input is taken for there: seconds of numbers, minutes of small tensors. A run with larger inputs is as
#: long as those are.
MOST_STEPS, LOOPED_SIZE = 2**26, 1024
_DIGITS = 20
#: Characters of one whole number: base 60 and 5,000 digits take long, no float holds 400, and nobody means them.
MOST_DIGITS = 64
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_SPANS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RATES = {"/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600}
#: Nobody has so much of anything, nor so little as one part of that.
_BEYOND = 1e18


@dataclass(frozen=True)
class CountRange:
    """The range of one count.

    Attributes:
        what: What is counted, as a sentence names it.
        least: The smallest number.
        most: The largest.
    """

    what: str
    least: int
    most: int

    def __call__(self, number: int) -> int:
        """Return the number.

        Raises:
            ValueError: It is out of range.

        >>> CountRange("samples in one run", 1, 4096)(5000)
        Traceback (most recent call last):
        ValueError: 5000 is out of range: samples in one run may be 1 to 4096
        """
        if not self.least <= number <= self.most:
            raise ValueError(f"{_shown(number)} is out of range: {self.what} may be {self.least} to {self.most}")
        return number

    def read(self, text: str) -> int:
        """Read the number from text.

        Raises:
            ValueError: It is no whole number, or out of range.

        >>> CountRange("restarts", 1, 1000).read(" 12 ")
        12
        """
        digits = text.strip()
        if len(digits) > _DIGITS and digits.lstrip("+-").isdecimal():
            raise ValueError(f"{shortened(digits)} is out of range: {self.what} may be {self.least} to {self.most}")
        try:
            return self(int(digits))
        except ValueError as error:
            if digits.lstrip("+-").isdecimal():
                raise
            raise ValueError(f"'{text}' is not a whole number") from error


#: 4 for each processor, and 64 anywhere: more only wait for each other, and take the machine's process ids.
_AT_ONCE = max(64, 4 * (os.cpu_count() or 1))
THREADS = CountRange("threads", 1, _AT_ONCE)
STREAMS = CountRange("callers at the same time", 1, _AT_ONCE)
#: The largest is that of a graph with a free batch (``program.MAX_BATCH``).
BATCH = CountRange("samples in one run", 1, 4096)
RESTARTS = CountRange("restarts", 1, 1000)
RUNS = CountRange("timed runs", 1, 1_000_000)
#: Of ONNX files: below, and above, torch's exporter writes no layer that integers fit. A test runs both ends.
OPSET = CountRange("the opset", 18, 25)
#: What every generator of random numbers takes.
SEED = CountRange("the seed", 0, 2**32 - 1)
PROCESSOR = CountRange("a processor's number", 0, 8191)
#: A whole size; the values of all sizes together are bounded too.
SIZE = CountRange("a size", 1, MAX_VALUES)


def sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of one input with its samples.

    Raises:
        ValueError: It has more values than one input may have.

    >>> sizes((2, 10**6, 10**6))
    Traceback (most recent call last):
    ValueError: 2 x 1000000 x 1000000 is more than the 1073741824 values that one input may have
    """
    if math.prod(shape) > MAX_VALUES:
        raise ValueError(
            f"{' x '.join(map(_shown, shape))} is more than the {MAX_VALUES} values that one input may have"
        )
    return tuple(shape)


def read_shapes(text: str, samples: int = 2) -> list[tuple[tuple[int, ...], str]]:
    """Return the sizes ``[samples, ...]`` and the type of each input, as ``--input-shape`` names them.

    Raises:
        UsageError: It is malformed.

    >>> read_shapes("3,8,8;16:int64")
    [((2, 3, 8, 8), 'float32'), ((2, 16), 'int64')]
    """
    found = []
    for part in text.split(";"):
        words, _, dtype = part.partition(":")
        try:
            shape = sizes([samples, *(SIZE.read(size) for size in words.split(",") if size.strip())])
        except ValueError as error:
            raise no_shape(part, error) from error
        found.append((shape, dtype or "float32"))
    return found


def no_shape(text: str, why: object) -> UsageError:
    """Return what is wrong with a part of ``--input-shape``."""
    hint = "Write sizes without the batch: 3,224,224 or 16:int64. Sizes that are free are named by --dynamic."
    return UsageError(f"--input-shape '{shortened(text)}' is not a shape: {why}.", hint=hint)


def check_shapes(text: str) -> str:
    """Return what ``--input-shape`` names if it can be read, as an option's type.

    Raises:
        UsageError: It is malformed.
    """
    if text:
        read_shapes(text)
    return text


def scaled(text: str, units: Mapping[str, float]) -> float:
    """Read a number with one of some units, or the sum of several.

    Raises:
        ValueError: It is none, or not finite.

    >>> scaled("5 ms", SECONDS), scaled("1s 500ms", SECONDS)
    (0.005, 1.5)
    """
    if text.lstrip().startswith("-"):
        raise ValueError(f"'{shortened(text)}' is less than nothing")
    found = re.findall(r"(\d+\.?\d*|\.\d+)\s*([a-zµ/]+)\s*", text.lower())
    read = "".join(number + unit for number, unit in found)
    if not found or read != "".join(text.lower().split()) or any(unit not in units for _, unit in found):
        raise ValueError(f"'{shortened(text)}' needs a unit: {', '.join(filter(str.isascii, units))}")
    return finite(sum(float(number) * units[unit] for number, unit in found))


def finite(number: float) -> float:
    """Return a number that something can be held against: nothing is more than NaN.

    Raises:
        ValueError: It is not finite.
    """
    if not math.isfinite(number):
        raise ValueError(f"{number} bounds nothing")
    return number


def require_trained(state: Mapping[str, Any]) -> None:
    """Check that the weights that a training left, by their names, are finite.

    Raises:
        Refused: One of them is not.
    """
    for name, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise Refused(f"Training left '{name}' not finite.", hint="Lower the learning rate.")


def read_number(text: str, above: float = -math.inf) -> float:
    """Return a finite number above another.

    Raises:
        ValueError: It is none.

    >>> read_number("20"), read_number("0.5", above=0)
    (20.0, 0.5)
    """
    try:
        number = float(text)
    except ValueError as error:
        raise ValueError(f"'{shortened(text)}' is not a number") from error
    if finite(number) <= above:
        raise ValueError(f"{number:g} is not above {above:g}")
    return number


def _positive(text: str, units: Mapping[str, float], example: str) -> float:
    """Return a number above zero in the unit that its own unit counts in.

    Raises:
        ValueError: It is none, not above zero, or beyond what anybody has.

    >>> read_span("20min"), read_time("20ms"), read_size("2MB")
    (1200.0, 0.02, 2000000.0)
    >>> read_rate("500/s"), read_rate("30/min")
    (500.0, 0.5)
    """
    if 1 / _BEYOND < (number := scaled(text, units)) < _BEYOND:
        return number
    if number > 1:
        raise ValueError(f"'{shortened(text)}' is more than there can be; write {example}, for example")
    raise ValueError(f"'{text}' is nothing; write {example}, for example")


#: How long something may go on, and how long an answer may take, in seconds; how many there are a second; bytes.
read_span = partial(_positive, units=_SPANS, example="20min")
read_time = partial(_positive, units=SECONDS, example="20ms")
read_rate = partial(_positive, units=_RATES, example="500/s")
read_size = partial(_positive, units=BYTES, example="2MB")


def read_pace(text: str) -> tuple[float, bool]:
    """Return how long a run may take: in seconds, or as a share of what it takes now, and whether it is a share.

    Raises:
        ValueError: It is neither, or does not lie within what can be asked.

    >>> read_pace("5ms"), read_pace("0.5x")
    ((0.005, False), (0.5, True))
    """
    try:
        number = scaled(text, {**SECONDS, "x": 1.0})
    except ValueError as error:
        raise ValueError(f"{error}, such as 5ms, or 0.5x for that share of the time") from error
    is_share = text.rstrip().lower().endswith("x")
    if number <= 0 or (is_share and number >= 1):
        raise ValueError(f"'{text}' is not a time such as 5ms, nor a share of the time below one such as 0.5x")
    return number, is_share


def check_pace(text: str) -> str:
    """Return what ``--latency`` says if it can be read.

    Raises:
        ValueError: It cannot.
    """
    read_pace(text)
    return text


def read_finite(digits: str) -> float:
    """Return a number of JSON; ``1e999`` is no name, and infinite all the same.

    Raises:
        ValueError: No float holds it.
    """
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"it says {digits}, which no float holds")
    return number


def read_whole(digits: str) -> int:
    """Return a whole number of JSON of no more digits than anybody means.

    Raises:
        ValueError: It has more.
    """
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def read_shard(text: str) -> tuple[int, int]:
    """Return which of how many parts ``3/8`` says, of which each has room for ten trials (``MOST_TRIALS``).

    Raises:
        ValueError: It says none.

    >>> read_shard("3/8")
    (3, 8)
    """
    if found := re.fullmatch(r"(\d{1,3})/(\d{1,3})", text.strip()):
        number, count = map(int, found.groups())
        if 1 <= number <= count:
            return number, count
    raise ValueError(f"'{shortened(text)}' is no part such as 3/8, from 1/8 to 8/8, and of 999 at most")


def read_bits(text: str) -> float:
    """Return the bits that ``4bits``, ``2.5bits`` or ``4`` says.

    Raises:
        ValueError: It says none.

    >>> read_bits("2.5bits"), read_bits("4")
    (2.5, 4)
    """
    number = text.removesuffix("bits").removesuffix("bit").strip()
    with contextlib.suppress(ValueError):
        bits = float(number)
        if 2 <= bits <= 8:
            return int(bits) if bits == int(bits) else bits
    raise ValueError(f"'{text}' is no number of bits from 2 to 8, such as 4bits or 2.5bits")


def _shown(number: int) -> str:
    """Return a number in digits, unless there are so many that Python refuses to print them."""
    return str(number) if abs(number) < 10**_DIGITS else f"a number of more than {_DIGITS} digits"


#: The share of the free memory that what a file answers to one question may take: it is compared as doubles.
ANSWER_SHARE = 16


def free_bytes() -> int:
    """Return the bytes of memory that can be had, without a limit where the system does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**63
