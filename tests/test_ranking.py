"""Which layers go back to float first."""

from hypothesis import given
from hypothesis import strategies as st

from optimize.costs import NodeCost
from optimize.measure.layer_times import LayerTime
from optimize.measure.runs import Speedup
from optimize.quantization.sensitivity import LayerError
from optimize.ranking import explain, fewest, rank, slow_choices
from optimize.search import reasons_to_stay


def error(name: str, noise: float) -> LayerError:
    return LayerError(name, f"path.{name}", "conv2d", noise)


def cost(name: str, macs: int, parameters: int = 10) -> NodeCost:
    return NodeCost(name, "conv2d", name, macs, parameters, {}, 0, "float32")


COSTS = {"a": cost("a", 3000), "b": cost("b", 3000), "c": cost("c", 1000)}
ERRORS = [error("a", 1e-3), error("b", 2e-3), error("c", 1e-3)]


def test_error_per_second_decides_and_a_layer_that_int8_slows_down_goes_first() -> None:
    times = {"a": LayerTime(2e-5, 1e-5), "b": LayerTime(9e-5, 1e-5), "c": LayerTime(1e-5, 2e-5)}
    assert rank(ERRORS, times, COSTS) == ["c", "a", "b"]


def test_without_the_times_of_all_the_error_for_the_work_decides() -> None:
    assert rank(ERRORS, {}, COSTS) == ["c", "b", "a"] == rank(ERRORS, {"c": LayerTime(1e-5, 2e-5)}, COSTS)


def test_weights_that_are_read_for_few_products_are_work_too() -> None:
    assert cost("a", macs=1000, parameters=1000).work == 9 * cost("b", macs=1000, parameters=0).work


def test_the_reason_names_the_bound_the_share_and_the_time() -> None:
    times = {"b": LayerTime(9e-5, 1e-5), "c": LayerTime(1e-5, 2e-5)}
    reasons = explain(ERRORS, times, "--max-drop 0.5")
    assert reasons["b"] == "given back to meet --max-drop 0.5: removes 50 % of the error for 80.0 µs"
    assert reasons["c"] == "given back to meet --max-drop 0.5: removes 25 % of the error at no cost in time"
    assert reasons["a"] == "given back to meet --max-drop 0.5: removes 25 % of the error"


@given(st.integers(0, 100), st.integers(1, 120))
def test_fewest_finds_the_first_count_that_holds_in_few_tries(most: int, first: int) -> None:
    tried = []

    def holds(count: int) -> bool:
        tried.append(count)
        return count >= first

    assert fewest(most, holds) == (first if first <= most else None)
    assert len(tried) <= 14 and all(1 <= count <= most for count in tried)


def test_neighbours_are_tried_together_the_greatest_loss_first() -> None:
    slow, fast = LayerTime(1e-5, 2e-5, is_slower=True), LayerTime(2e-5, 1e-5)
    worst = LayerTime(1e-5, 9e-5, is_slower=True)
    times = {"a": slow, "b": slow, "c": fast, "d": worst, "e": fast, "f": slow}
    assert slow_choices(times) == [["d"], ["d", "a", "b"], ["d", "a", "b", "f"]]
    assert slow_choices({"a": slow}) == [["a"]] and slow_choices({"a": fast}) == []


def test_every_layer_that_is_slower_in_int8_has_a_reason_to_stay() -> None:
    times = {
        "fast": LayerTime(4e-6, 1e-6),
        "noisy": LayerTime(1e-6, 2e-6),
        "tried": LayerTime(1e-6, 2e-5, is_slower=True),
        "untried": LayerTime(1e-6, 2e-5, is_slower=True),
    }
    times["beside"] = times["tried"]
    gains = (Speedup(1.01, 0.99, 1.03), Speedup(0.76, 0.75, 0.77), None)
    found = reasons_to_stay(times, (["tried"], ["tried", "beside"], ["tried", "beside", "untried"]), gains)
    assert (
        found.pop("beside")
        == "with 2 such layers in float the whole file is 0.76× as fast [0.75, 0.77], which is slower"
    )
    assert found["tried"].startswith("with it in float the whole file is 1.01×") and "not surely" in found["tried"]
    taken = reasons_to_stay(times, (["tried"], ["tried", "beside"]), (Speedup(1.79, 1.78, 1.8), gains[0]), ["tried"])
    assert "tried" not in taken and taken["beside"].endswith(
        "is 1.01× as fast [0.99, 1.03], which is not surely more than the 1.79× as fast [1.78, 1.80] of the file that "
        "was taken"
    )
    assert set(found) == {"noisy", "tried", "untried"}
    assert (
        "within the noise" in found["noisy"] and "1.01×" in found["tried"] and "could not be timed" in found["untried"]
    )
