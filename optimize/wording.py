"""Every number and name as the reader sees it. Console, Markdown and HTML take their text from here, so they agree.

A missing value is an en dash. Seconds and ratios have three digits, sizes are decimal (1 MB is 10^6 bytes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optimize.distances import CAP_DB

MISSING = "–"
#: What is said of a file that rounds where there was no data: noise shows neither what is lost nor that nothing is.
NOT_JUDGED = "not judged: what rounding loses shows on samples that are answered with numbers, not on noise: give some"
#: A difference of numbers about one that is none but of how they were added up.
_ROUNDING = 1e-12
Units = tuple[tuple[float, str], ...]
TIMES: Units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_ENERGIES = ((1.0, "J"), (1e-3, "mJ"), (1e-6, "µJ"))
COUNTS: Units = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def digits(value: float) -> str:
    """Return a number with three significant digits and no exponent.

    >>> [digits(value) for value in (1.2345, 12.345, 123.45, 1234.5, 0.0)]
    ['1.23', '12.3', '123', '1234', '0.00']
    """
    return f"{value:.{_decimals(value)}f}"


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it.

    >>> seconds(0.0014532), seconds(2.5), seconds(None)
    ('1.45 ms', '2.50 s', '–')
    """
    return _in_unit(value, TIMES)


def span(value: float) -> str:
    """Return how long something went on, in minutes and whole seconds.

    >>> span(12.4), span(754.0)
    ('12 s', '12:34 min')
    """
    minutes, left = divmod(round(value), 60)
    return f"{minutes}:{left:02d} min" if minutes else f"{left} s"


def seconds_saved(value: float | None) -> str:
    """Return a difference of durations with its sign.

    >>> seconds_saved(1.2e-5), seconds_saved(-0.0031), seconds_saved(None)
    ('+12.0 µs', '−3.10 ms', '–')
    """
    return MISSING if value is None else f"{'−' if value < 0 else '+'}{seconds(abs(value))}"


def interval(value: float, low: float, high: float, units: Units = ((1.0, ""),)) -> str:
    """Return an interval with the digits its value is shown with, in the unit of it.

    >>> interval(12.34, 12.25, 12.5), interval(0.00145, 0.00144, 0.0147, TIMES)
    ('[12.2, 12.5]', '[1.44, 14.70]')
    """
    scale, _ = _unit(value, units)
    places = _decimals(value / scale)
    return f"[{low / scale:.{places}f}, {high / scale:.{places}f}]"


def ratio(value: float | None) -> str:
    """Return how many times faster or smaller.

    >>> ratio(3.2149)
    '3.21×'
    """
    return MISSING if value is None else f"{digits(value)}×"


def rate(value: float) -> str:
    """Return how many a second.

    >>> rate(1234.5), rate(2.5), rate(1_234_567.0)
    ('1.23 k', '2.50', '1.23 M')
    """
    return _in_unit(value, COUNTS)


def energy(value: float | None) -> str:
    """Return an energy in joules.

    >>> energy(0.0123), energy(2.5), energy(None)
    ('12.3 mJ', '2.50 J', '–')
    """
    return _in_unit(value, _ENERGIES)


def size(value: int | None) -> str:
    """Return a number of bytes.

    >>> size(2_350_000), size(999), size(None)
    ('2.35 MB', '999 B', '–')
    """
    return _in_unit(value, _SIZES, whole=True)


def count(value: int) -> str:
    """Return a large count.

    >>> count(1_510_000_000), count(12)
    ('1.51 G', '12')
    """
    return _in_unit(value, COUNTS, whole=True)


def decibels(value: float | None) -> str:
    """Return a signal to noise ratio; the cap means that the outputs are equal.

    >>> decibels(34.56), decibels(200.0)
    ('34.6 dB', 'equal')
    """
    if value is None:
        return MISSING
    return "equal" if value >= CAP_DB else f"{value:.1f} dB"


def share(value: float | None) -> str:
    """Return a share of one in percent; only a full share is 100 %.

    >>> share(0.98765), share(0.99999), share(1.0)
    ('98.77 %', '99.99 %', '100 %')
    """
    if value is None:
        return MISSING
    return "100 %" if value == 1.0 else f"{min(100 * value, 99.99) if value < 1 else 100 * value:.2f} %"


def score(value: float, unit: str) -> str:
    """Return a metric's value: shares of one in percent, decibels, other numbers as they are.

    >>> score(0.9123, "%"), score(0.51234, ""), score(34.56, "dB")
    ('91.23 %', '0.5123', '34.6 dB')
    """
    return share(value) if unit == "%" else decibels(value) if unit == "dB" else f"{value:.4g}"


def change(difference: float, unit: str) -> str:
    """Return how much a metric changed, shares in points, which are hundredths of one.

    >>> change(-0.004, "%"), change(0.0, "%"), change(0.25, ""), change(-1.234, "dB"), change(-3.7e-15, "")
    ('−0.40 points', '±0.00 points', '+0.25', '−1.23 dB', '±0')
    """
    text = _signed(difference, unit)
    return f"{'±' if float(text) == 0 else text[0]}{text[1:]} {points(unit)}".strip().replace("-", "−")


def percent_change(ratio: float) -> str:
    """Return by how many percent a ratio is from one.

    >>> percent_change(1.0684), percent_change(0.836)
    ('+6.8 %', '−16.4 %')
    """
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")


def change_interval(low: float | None, high: float | None, unit: str) -> str:
    """Return the interval of a change of a metric, empty where there is none.

    >>> change_interval(-0.009, 0.001, "%"), change_interval(-0.00012, 3e-05, "")
    ('[−0.90, +0.10]', '[−0.00012, +3e−05]')
    """
    if low is None or high is None:
        return ""
    return f"[{_signed(low, unit)}, {_signed(high, unit)}]".replace("-", "−")


def points(unit: str, number: float = 0.0) -> str:
    """Return what a difference of a metric is in: points of a share, of which one is a point, decibels, or nothing.

    >>> points("%"), points("%", 1), points("dB"), points("")
    ('points', 'point', 'dB', '')
    """
    return ("point" if number == 1 else "points") if unit == "%" else unit


def _signed(difference: float, unit: str) -> str:
    if unit:
        return f"{100 * difference if unit == '%' else difference:+.2f}"
    return f"{difference if abs(difference) > _ROUNDING else 0.0:+.3g}"


def error(value: float | None) -> str:
    """Return a small error with two digits and an exponent.

    >>> error(0.0001234), error(0.0)
    ('1.2e-04', '0')
    """
    if value is None:
        return MISSING
    return "0" if value == 0 else f"{value:.1e}"


def rounded_up(value: float) -> str:
    """Return what to ask for at least, with two significant digits.

    >>> rounded_up(486.2), rounded_up(1.855), rounded_up(12.0), rounded_up(1961)
    ('490', '1.9', '12', '2,000')
    """
    step = 10.0 ** (math.floor(math.log10(value)) - 1) if value > 0 else 1.0
    return f"{math.ceil(value / step - 1e-9) * step:,.10g}"


def plural(number: int, noun: str) -> str:
    """Return a number of things.

    >>> plural(1, "rewrite"), plural(10_000, "sample")
    ('1 rewrite', '10,000 samples')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def and_others(number: int, noun: str) -> str:
    """Return what is said behind one thing of others like it; empty where there are none.

    >>> and_others(2, "scenario"), and_others(0, "scenario")
    (' and 2 other scenarios', '')
    """
    return f" and {plural(number, f'other {noun}')}" if number else ""


def named(names: Sequence[str], most: int) -> str:
    """Return names inside a sentence, the first of many.

    >>> named(["a", "b"], 2), named(["a", "b", "c"], 1)
    ('a, b', 'a and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def reach(least: str, most: str) -> str:
    """Return how far figures go.

    >>> reach("3 %", "12 %"), reach("3 %", "3 %")
    ('3 % to 12 %', '3 %')
    """
    return least if least == most else f"{least} to {most}"


def _decimals(value: float) -> int:
    return 2 if value == 0 else min(max(2 - math.floor(math.log10(abs(value))), 0), 2)


def _unit(value: float, units: Units) -> tuple[float, str]:
    return next((entry for entry in units if abs(value) >= entry[0]), units[-1])


def _in_unit(value: float | None, units: Units, *, whole: bool = False) -> str:
    """Return a figure in the unit that suits it; ``whole`` ones have no digits behind the point below 1,000."""
    if value is None:
        return MISSING
    scale, unit = _unit(value, units)
    return f"{value if whole and scale == 1.0 else digits(value / scale)} {unit}".strip()
