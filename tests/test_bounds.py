"""Counts and sizes have bounds wherever they are given; what is out of them is refused before anything is allocated."""

import pytest

from optimize import bounds
from optimize.datasets import example_inputs
from optimize.errors import UsageError
from optimize.gate import limits
from optimize.program import MAX_BATCH
from optimize.recipe import Recipe, parse


def test_sixty_four_threads_are_allowed_anywhere() -> None:
    assert bounds.THREADS(64) == 64 and parse({"threads": 64}).threads == 64
    assert bounds.THREADS.most == bounds.STREAMS.most < 10_000


def test_a_batch_is_what_a_free_one_may_be() -> None:
    assert bounds.BATCH.most == MAX_BATCH


@pytest.mark.parametrize("number", [0, -1, 1_000_000, 10**4000])
def test_recipes_and_configurations_are_bounded(number: int) -> None:
    with pytest.raises(UsageError, match=r"threads: .* is out of range: threads may be 1 to") as refusal:
        parse({"threads": number})
    assert len(refusal.value.what) < 200
    for key in ("threads", "batch"):
        with pytest.raises(UsageError, match="is out of range"):
            limits.settings({key: number}, given={"cases": [{"base": "a", "candidate": "b"}]}, source="here")


def test_a_recipe_has_no_end_of_passes() -> None:
    with pytest.raises(UsageError, match="at most 1000 items"):
        parse({"passes": ["FuseConvBN"] * 80_000})


@pytest.mark.parametrize(
    "shape, words",
    [
        ("1000000,1000000,1000000", "2 x 1000000 x 1000000 x 1000000 is more than the"),
        ("9" * 5000, "a size may be 1 to"),
        ("3,0", "0 is out of range"),
        ("3,-1", "-1 is out of range"),
        ("3,x", "'x' is not a whole number"),
        ("3:strange", "'strange' is none of the types float32, float64,"),
        ("3:" + "s" * 5000, "is none of the types"),
        ("3:quint8", "'quint8' is none of the types"),
        ("3:float8_e5m2", "'float8_e5m2' is none of the types"),
        ("3:nn", "'nn' is none of the types"),
    ],
)
def test_shapes_are_bounded(shape: str, words: str) -> None:
    with pytest.raises(UsageError, match="is not a shape") as refusal:
        example_inputs(Recipe(input_shape=shape))
    assert words in refusal.value.what


def test_a_fixed_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_VALUES", 100)
    assert example_inputs(Recipe(input_shape="10", static_batch=10))[0].shape == (10, 10)
    with pytest.raises(UsageError, match="11 x 10 is more than the 100 values"):
        example_inputs(Recipe(input_shape="10", static_batch=11))
