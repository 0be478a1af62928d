"""Agreement on outputs whose distance is known in closed form."""

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from optimize.distances import output_error
from optimize.errors import VerificationFailed
from optimize.measure.agreement import AgreementMeter
from optimize.measure.distance import DistanceMeter
from optimize.targets.arrays import digest


def meter(*batches: tuple[list[np.ndarray], list[np.ndarray]]) -> AgreementMeter:
    found = AgreementMeter()
    for expected, got in batches:
        found.update(expected, got)
    return found


def test_known_distance() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    found = np.array([[3.0, 4.5], [0.0, 0.0]], np.float32)
    result = meter(([expected], [found])).result()
    assert result is not None
    assert result.sqnr_db == pytest.approx(20.0)  # 10 log10(25 / 0.25)
    assert result.max_abs_error == 0.5 and result.top1 == 1.0


def test_equal_outputs_are_capped_and_silence_is_the_floor() -> None:
    zero, one = np.zeros((1, 3)), np.ones((1, 3))
    assert meter(([one], [one])).result().sqnr_db == 200.0  # type: ignore[union-attr]
    assert meter(([zero], [one])).result().sqnr_db == -200.0  # type: ignore[union-attr]


@pytest.mark.parametrize("differs", [1e-12, 1e-180])
def test_what_differs_in_a_place_is_not_equal(differs: float) -> None:
    """Beside values of 1e12 a difference is small, whatever it is beside its own; its square may be none."""
    one = np.array([[1e12, 0.0]])
    assert meter(([one], [one + np.array([0.0, differs])])).result().sqnr_db == 199.9  # type: ignore[union-attr]


def test_worst_output_decides_and_only_logits_have_a_top1() -> None:
    image, box = np.ones((2, 3, 4, 4)), np.full((2, 4), 100.0)
    result = meter(([image, box], [image * 1.1, box])).result()
    assert result is not None
    assert result.sqnr_db == pytest.approx(20.0)
    assert result.top1 is None


@pytest.mark.parametrize(
    "output", [np.array([[999, 1], [999, 2]]), np.ones((2, 3), bool), np.array([[np.nan, 1.0], [np.nan, 2]])]
)
def test_tokens_truths_and_nan_are_the_largest_of_nothing(output: np.ndarray) -> None:
    result = meter(([output], [output])).result()
    assert result is not None and result.sqnr_db == 200.0 and result.top1 is None


def test_a_sample_with_nan_has_no_largest_and_the_others_have() -> None:
    output = np.array([[np.nan, 1.0], [2.0, 1.0], [1.0, 3.0], [1.0, 3.0]])
    result = meter(([output], [output * [1.0, 0.5]])).result()
    assert result is not None and result.top1 == 1.0
    result = meter(([output], [output * [1.0, 0.1]])).result()
    assert result is not None and result.top1 == pytest.approx(1 / 3)


def test_no_batch_is_no_agreement() -> None:
    assert AgreementMeter().result() is None


@pytest.mark.parametrize("nothing", [np.zeros((0, 4)), np.full((2, 4), np.nan)])
def test_outputs_without_a_number_prove_nothing(nothing: np.ndarray) -> None:
    meter = AgreementMeter()
    meter.update([nothing], [nothing])
    found = meter.result()
    assert found is not None and not found.judged and found.is_empty and found.caveat == "no number to compare"
    meter.update([np.ones((1, 4))], [np.ones((1, 4))])
    found = meter.result()
    assert found is not None and found.judged and not found.is_empty and not found.caveat


FLAT, DRAWN, EMPTY = np.full((4, 3), 7.0), np.random.default_rng(0).normal(size=(4, 3)), np.zeros((4, 0))


@pytest.mark.parametrize(
    ("outputs", "caution", "doubt"),
    [
        ([DRAWN], "", ""),
        ([FLAT], "'0': it was the same for all", "'0' was the same for all samples"),
        ([np.array(7.0)], "'0': it was the same for all", "'0' was the same for all samples"),
        (
            [FLAT, FLAT],
            "'0': it was the same for all samples, '1': it was the same for all",
            "'0' was the same for all samples and '1' was the same",
        ),
        ([DRAWN, FLAT], "'1': it was the same for all", ""),
        ([DRAWN, EMPTY], "'1': it held no number", "'1' held no number"),
        (
            [FLAT, EMPTY],
            "'0': it was the same for all samples, '1': it held no number",
            "'0' was the same for all samples and '1' held no number",
        ),
    ],
)
def test_outputs_that_any_model_would_answer_prove_nothing(outputs: list[np.ndarray], caution: str, doubt: str) -> None:
    meter = AgreementMeter()
    for _ in range(2):
        meter.update(outputs, outputs)
    found = meter.result()
    assert found is not None and found.judged and caution in found.caution and bool(caution) is bool(found.caution)
    assert found.doubt.startswith(doubt) and bool(doubt) is bool(found.doubt)


def test_one_sample_is_not_the_same_as_others_and_a_fixed_answer_is_in_either_file() -> None:
    for want, got, told in ((FLAT[:1], FLAT[:1], {}), (FLAT + DRAWN, FLAT, {"0": "was the same for all samples"})):
        found = meter(([want], [got])).result()
        assert found is not None and found.unproved == told


def test_decibels_of_what_answers_have_in_common_are_told() -> None:
    draw = np.random.default_rng(0)
    want, other = 1000 + draw.normal(size=(2, 50, 10))
    for got, told in ((want, False), (other, True)):
        found = meter(([want], [got])).result()
        assert found is not None and found.sqnr_db > 50
        assert ("in common hides" in found.caution) is told


def test_equal_infinities_agree() -> None:
    masked = np.array([[1.0, -np.inf]])
    result = meter(([masked], [masked])).result()
    assert result is not None and result.sqnr_db == 200.0 and result.max_abs_error == 0.0


@pytest.mark.parametrize("mask", [-1e4, -1e9, -1e30, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("cut", [8, 3])
def test_a_mask_in_place_of_minus_infinity_hides_no_error(mask: float, cut: int) -> None:
    draw = np.random.default_rng(0)
    want = draw.normal(size=(8, 20)).astype(np.float32)
    got = want + 0.1 * draw.normal(size=(8, 20)).astype(np.float32)
    halves = [(want, got)] if cut == 8 else [(want[:cut], got[:cut]), (want[cut:], got[cut:])]
    plain = meter(*(([one], [other]) for one, other in halves)).result()
    want[:, ::4] = got[:, ::4] = mask
    masked = meter(*(([one], [other]) for one, other in halves)).result()
    assert plain is not None and masked is not None
    assert 15 < plain.sqnr_db < 25 and abs(masked.sqnr_db - plain.sqnr_db) < 2
    error, scale = output_error(torch.from_numpy(want), torch.from_numpy(got))
    assert error == masked.max_abs_error and scale < 5
    same = meter(([want], [want])).result()
    assert same is not None and same.sqnr_db == 200.0


def test_large_answers_are_no_masks() -> None:
    large = np.array([[-5e4, -2.5e4, 3e4, 1e3]], np.float32)
    found = meter(([large], [large + np.array([0, 100, 0, 0], np.float32)])).result()
    assert found is not None and found.sqnr_db == pytest.approx(10 * np.log10((25 + 6.25 + 9 + 0.01) * 1e8 / 1e4))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_value_that_is_no_longer_finite_fails(wrong: float) -> None:
    with pytest.raises(VerificationFailed, match="Output 0 of the artifact is not finite"):
        meter(([np.ones((1, 2))], [np.array([[1.0, wrong]])]))


def test_another_shape_or_number_of_outputs_fails() -> None:
    with pytest.raises(VerificationFailed, match=r"has shape \[1, 3\]"):
        meter(([np.ones((1, 2))], [np.ones((1, 3))]))
    with pytest.raises(VerificationFailed, match="returns 0 outputs"):
        meter(([np.ones((1, 2))], []))


def test_complex_outputs_are_pairs_of_reals() -> None:
    """Equal real parts are no agreement; a phase that is a tenth off is 20 dB."""
    want = np.array([[1 + 1j, 2 - 2j]], np.complex64)
    conjugate = meter(([want], [want.conj()])).result()
    assert conjugate is not None and conjugate.sqnr_db < 0 and conjugate.max_abs_error == 4 and conjugate.top1 is None
    turned = meter(([want], [want * (1 + 0.1j)])).result()
    assert turned is not None and turned.sqnr_db == pytest.approx(20.0, abs=1e-4)
    with pytest.raises(VerificationFailed, match="not finite"):
        meter(([want], [want + np.array(complex(0, np.nan))]))


@pytest.mark.parametrize(("want", "got"), [(1, 1j), (1j, 1)])
def test_a_complex_output_for_a_real_one_fails(want: complex, got: complex) -> None:
    with pytest.raises(VerificationFailed, match="the original's is"):
        meter(([np.full((1, 2), want)], [np.full((1, 2), got)]))


@pytest.mark.parametrize("other", [np.array(["a"]), np.array([None]), [np.ones(1)]])
def test_what_holds_no_numbers_fails(other: Any) -> None:
    with pytest.raises(VerificationFailed, match="Output 0 is"):
        meter(([other], [other]))


def test_squares_that_overflow_never_pass() -> None:
    large = np.array([[1e200, 1.0]])
    for other in (-large, large * 1.0001):
        found = meter(([large], [other])).result()
        assert found is not None and found.sqnr_db == -200.0
    same = meter(([large], [large])).result()
    assert same is not None and same.sqnr_db == 200.0


_PARTS = st.sampled_from([0.0, 1.0, -1.0, np.nan, np.inf, -np.inf])
_COMPLEX = arrays.arrays(np.complex128, (1, 3), elements=st.builds(complex, _PARTS, _PARTS))


@settings(max_examples=200, deadline=None)
@given(_COMPLEX, _COMPLEX)
def test_what_is_not_finite_in_one_place_only_never_passes(want: np.ndarray, got: np.ndarray) -> None:
    pairs = [(want, got), (want.real.copy(), got.real.copy())]
    for one, other in pairs:
        same = np.array_equal(one.view(np.float64), other.view(np.float64), equal_nan=True)
        distance = DistanceMeter()
        distance.update(one, other)
        assert same == (distance.result().sqnr_db == 200.0)
        try:
            found = meter(([one], [other])).result()
        except VerificationFailed:
            assert not same
            continue
        assert found is not None and same == (found.sqnr_db == 200.0)


def distance_db(one: np.ndarray, other: np.ndarray) -> float:
    found = DistanceMeter()
    found.update(one, other)
    return found.result().sqnr_db


def test_a_class_is_right_or_wrong_however_near() -> None:
    classes = np.full(100, 950)
    assert distance_db(classes, classes + 49) == 0.0
    one_wrong = np.where(np.arange(100) == 7, 951, 950)
    assert distance_db(classes, one_wrong) == 20.0 and distance_db(classes, one_wrong.astype(np.int32)) == 20.0
    assert distance_db(classes, one_wrong.astype(np.float32)) == 20.0
    assert distance_db(classes.astype(np.float32), one_wrong) == 20.0
    assert distance_db(np.array([2**60]), np.array([2**60 + 1])) == 0.0
    pixels = np.full(100, 200, np.uint8)  # what has steps is a signal
    assert distance_db(pixels, pixels + 1) == pytest.approx(46.0, abs=0.1)


def test_the_second_files_type_hides_nothing() -> None:
    """Zeros for what is zero nearly everywhere, as whole numbers: no class is right where the original has none."""
    want = np.zeros((4, 300), np.float32)
    want[:, 7] = 3.0
    zeros = np.zeros((4, 300), np.int64)
    assert distance_db(want, zeros) == distance_db(want, zeros.astype(np.float32)) == 0.0
    assert distance_db(want, want.astype(np.int64)) == 200.0


def test_squares_that_vanish_are_no_agreement() -> None:
    assert distance_db(np.array([1e-200]), np.array([1e-190])) == -200.0
    assert distance_db(np.array([1e-200]), np.array([1e-200])) == 200.0


@settings(max_examples=50, deadline=None)
@given(arrays.arrays(np.float32, (6, 4), elements=st.floats(-1e3, 1e3, width=32)), st.integers(1, 5))
def test_batches_do_not_change_the_result_and_json_can_hold_it(outputs: np.ndarray, cut: int) -> None:
    other = outputs[::-1] * np.float32(1.5)
    whole = meter(([outputs], [other])).result()
    parts = meter(([outputs[:cut]], [other[:cut]]), ([outputs[cut:]], [other[cut:]])).result()
    assert whole is not None and parts is not None
    assert whole.sqnr_db == pytest.approx(parts.sqnr_db) and whole.top1 == parts.top1
    assert whole.max_abs_error == parts.max_abs_error
    json.dumps(vars(whole), allow_nan=False)


def test_a_large_answer_is_compared_in_parts_and_gives_what_it_gives_whole() -> None:
    generator = np.random.default_rng(0)
    expected = generator.standard_normal((3, 1_000_003)).astype(np.float32)
    found = expected + generator.standard_normal(expected.shape).astype(np.float32) / 100
    expected[2, 7], found[1, 9] = np.nan, np.inf
    finite = np.isfinite(expected) & np.isfinite(found)
    want, got = expected[finite].astype(np.float64), found[finite].astype(np.float64)
    whole = DistanceMeter()
    whole.update(expected, found)
    result = whole.result()
    assert result.not_finite == 2 and result.max_abs_error == np.abs(want - got).max()
    assert result.noise_power == pytest.approx(np.square(want - got).mean(), rel=1e-9)
    assert result.second_range == (np.nanmin(found), found[np.isfinite(found)].max())


def test_a_large_answer_takes_little_memory_beside_itself() -> None:
    answers = np.zeros(64 << 20, bool), np.ones(64 << 20, bool)
    tracemalloc.start()
    try:
        found = DistanceMeter()
        found.update(*answers)
        assert digest(answers[:1]) != digest(answers[1:])
        assert found.result().sqnr_db == 0.0 and tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_several_outputs_are_told_by_their_names_and_one_is_not() -> None:
    want, near, far = (np.full((2, 3), value, np.float32) for value in (1.0, 1.001, 1.1))
    meter, alone = AgreementMeter(), AgreementMeter()
    meter.update([want, want], [near, far], ["boxes", "scores"])
    alone.update([want], [near], ["boxes"])
    found, single = meter.result(), alone.result()
    assert found is not None and single is not None
    assert found.outputs == pytest.approx({"boxes": 60.0, "scores": 20.0}, abs=0.1)
    assert found.sqnr_db == found.outputs["scores"] and single.outputs == {}


@pytest.mark.parametrize(("count", "told"), [(48, {"y": "in 4 of 6 places of its axis 1"}), (7, {})])
def test_columns_that_are_lost_beside_larger_ones_are_told(count: int, told: dict[str, str]) -> None:
    """Shares below prices. Of a few samples any number may be small by chance."""
    want = np.random.default_rng(0).normal(0, [1000] * 2 + [0.1] * 4, (count, 6)).astype(np.float32)
    meter = AgreementMeter()
    meter.update([want], [want * np.float32([1.001] * 2 + [0.0] * 4)], ["y"])
    found = meter.result()
    assert found is not None and found.sqnr_db > 50 and found.lost == told


@pytest.mark.parametrize("shape", [(64,), (64, 1), (64, 1, 4, 4)])
def test_samples_that_are_lost_beside_larger_ones_are_told(shape: tuple[int, ...]) -> None:
    """Prices of which three are a thousand times as high; errors of a hundredth of all alike lose none."""
    draw = np.random.default_rng(0)
    want = draw.uniform(0.5, 1.5, shape).astype(np.float32)
    want[:3] *= 1000
    lost = np.where(np.arange(64).reshape(-1, *[1] * (len(shape) - 1)) < 3, want, -want)
    near = want + np.float32(0.1) * draw.normal(0, 1, shape).astype(np.float32)
    for got, told in ((lost, {"y": "in 61 of 64 samples"}), (near, {})):
        meter = AgreementMeter()
        for part in (slice(0, 40), slice(40, 64)):
            meter.update([want[part]], [got[part]], ["y"])
        found = meter.result()
        assert found is not None and found.sqnr_db > 35 and found.lost == told


@pytest.mark.parametrize("way", ["types", "nan"])
def test_what_decibels_leave_out_is_told(way: str) -> None:
    want = np.arange(8, dtype=np.float32).reshape(4, 2)
    got, told = want.astype(np.float16), "answers in float16 in the output 'y', where the original answers in float32."
    if way == "nan":
        got = want = np.where(want < 2, np.nan, want)
        told = "answers NaN where the original does, 25.00 % of the output 'y': nothing is compared there."
    meter = AgreementMeter()
    meter.update([want], [got], ["y"])
    found = meter.result()
    assert found is not None and found.sqnr_db == 200 and not found.doubt and found.caution == told


def test_a_part_that_is_lost_beside_larger_numbers_is_told() -> None:
    """Scores of 0 to 1 below places in pixels: without a score decibels are those of the places."""
    draw = np.random.default_rng(0)
    boxes, scores = draw.uniform(0, 640, (4, 4, 50)), draw.uniform(0, 1, (4, 6, 50))
    want = np.concatenate([boxes, scores], 1).astype(np.float32)
    near = (want * (1 + draw.normal(0, 0.01, want.shape))).astype(np.float32)
    lost = near.copy()
    lost[:, 4:] = 0.0
    for axes, axis in (((0, 1, 2), 1), ((0, 2, 1), 2)):
        for got, told in ((near, ""), (lost, f"in 6 of 10 places of its axis {axis}")):
            meter = AgreementMeter()
            for start in (0, 2):
                batches = (array[start : start + 2].transpose(axes) for array in (want, got))
                meter.update(*([batch] for batch in batches), ["y"])
            found = meter.result()
            assert found is not None and found.sqnr_db > 35
            assert found.lost == ({"y": told} if told else {}) and bool(found.caution) is bool(told)


@pytest.mark.parametrize(("apart", "told"), [(0.1, False), (0.9, False), (1.2, True), (3.0, True)])
def test_a_file_that_one_fixed_answer_would_beat_is_told(apart: float, told: bool) -> None:
    """Prices around 1,000: thirty decibels and more are what all of them have in common."""
    draws = np.random.default_rng(0)
    wanted = 1000 + 8 * draws.standard_normal((400, 1))
    meter = AgreementMeter()
    for start in range(0, 400, 64):
        rows = wanted[start : start + 64]
        meter.update([rows], [rows + apart * 8 * draws.standard_normal(rows.shape)], ["price"])
    found = meter.result()
    assert found is not None and found.sqnr_db > 30
    assert ("as far off in the output 'price' as one fixed answer," in found.caution) is told


def test_large_outputs_and_few_samples_say_nothing_of_fixed_answers() -> None:
    for shape in ((6, 1), (400, 1 << 17)):
        meter, wanted = AgreementMeter(), np.full(shape, 1000.0, np.float32)
        wanted[::2] += 1
        meter.update([wanted], [wanted + 5])
        found = meter.result()
        assert found is not None and not found.caution
