"""Agreement on outputs whose distance is known in closed form."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from optimize.errors import VerificationFailed
from optimize.measure.agreement import AgreementMeter


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


def test_worst_output_decides_and_only_logits_have_a_top1() -> None:
    image, box = np.ones((2, 3, 4, 4)), np.full((2, 4), 100.0)
    result = meter(([image, box], [image * 1.1, box])).result()
    assert result is not None
    assert result.sqnr_db == pytest.approx(20.0)
    assert result.top1 is None


def test_no_batch_is_no_agreement() -> None:
    assert AgreementMeter().result() is None


def test_equal_infinities_agree() -> None:
    masked = np.array([[1.0, -np.inf]])
    result = meter(([masked], [masked])).result()
    assert result is not None and result.sqnr_db == 200.0 and result.max_abs_error == 0.0


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_value_that_is_no_longer_finite_fails(wrong: float) -> None:
    with pytest.raises(VerificationFailed, match="Output 0 of the artifact is not finite"):
        meter(([np.ones((1, 2))], [np.array([[1.0, wrong]])]))


def test_another_shape_or_number_of_outputs_fails() -> None:
    with pytest.raises(VerificationFailed, match=r"has shape \[1, 3\]"):
        meter(([np.ones((1, 2))], [np.ones((1, 3))]))
    with pytest.raises(VerificationFailed, match="returns 0 outputs"):
        meter(([np.ones((1, 2))], []))


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
