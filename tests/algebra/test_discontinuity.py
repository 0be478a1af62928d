"""Where the last bit of a sum decides the answer, however far behind it that is."""

from torch import fx

from optimize.algebra import monotone
from optimize.graph import aten


def test_a_rounding_is_found_behind_thousands_of_calls() -> None:
    """A file may have as many as it likes, more than Python calls within calls."""
    built = fx.Graph()
    value = first = built.placeholder("x")
    for _ in range(5000):
        value = built.call_function(aten.relu.default, (value,))
    assert monotone.reason_for_last_bit(first) == ""
    built.call_function(aten.round.default, (value,))
    assert "is rounded" in monotone.reason_for_last_bit(first)
