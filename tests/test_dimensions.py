"""What is said of free dimensions is read in one form, and fits inputs or is refused in a sentence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimize.dimensions import BATCH, FreeSize, find_free, read_dynamic
from optimize.errors import UsageError

IDS, MASK, IMAGE = (2, 16), (2, 16), (2, 3, 32, 48)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("sequence", {"*": {1: "sequence"}}),
        ("sequence:16..512", {"*": {1: "sequence:16..512"}}),
        ("ids:1=sequence, mask:1=sequence", {"ids": {1: "sequence"}, "mask": {1: "sequence"}}),
        ("-1=time", {"*": {-1: "time"}}),
        ({"ids": {1: "sequence"}}, {"ids": {1: "sequence"}}),
        ({"ids": {"1": "sequence:2.."}}, {"ids": {1: "sequence:2.."}}),
        ({"ids": {1: torch.export.Dim("n", min=4, max=64)}}, {"ids": {1: "n:4..64"}}),
        ({"ids": {1: torch.export.Dim("n")}}, {"ids": {1: "n"}}),
        (None, {}),
    ],
)
def test_it_is_read_in_one_form(said: object, found: object) -> None:
    assert read_dynamic(said) == found
    assert read_dynamic(read_dynamic(said)) == found


@pytest.mark.parametrize(
    "said",
    [
        "ids:=n", "ids:x=n", "=n", "a b", "n:5..2", "n:0..4", "n:16", "n:-1..4", "ids:1=", "1n", ",", "ids:1=a,ids:1=b",
        {"ids": "sequence"}, {"ids": {"one": "n"}}, {"ids": {1: 5}}, {"ids": {1: None}}, ["sequence"], 7,
        {"ids": {1: torch.export.Dim.DYNAMIC}},
    ],
)  # fmt: skip
def test_what_is_no_free_dimension_is_refused(said: object) -> None:
    with pytest.raises(UsageError) as caught:
        read_dynamic(said)
    assert caught.value.hint or "two names" in caught.value.what


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = read_dynamic(text)
    except UsageError:
        return
    assert all(isinstance(dim, int) and name for dims in found.values() for dim, name in dims.items())


def free(said: object, *, batch: bool = True, size: bool = False, **inputs: tuple[int, ...]) -> object:
    return find_free(read_dynamic(said), tuple(inputs), list(inputs.values()), batch=batch, size=size)


def test_a_short_form_is_dimension_one_of_all_inputs() -> None:
    found = free("sequence:8..64", ids=IDS, mask=MASK)
    assert found.names == ({0: BATCH, 1: "sequence"}, {0: BATCH, 1: "sequence"})
    assert found.sizes == {"sequence": FreeSize(8, 64)}


def test_inputs_without_the_dimension_are_left_out() -> None:
    assert free("n", ids=IDS, kind=(2,)).names == ({0: BATCH, 1: "n"}, {0: BATCH})


def test_sizes_of_images_are_a_short_word_for_two_dimensions() -> None:
    assert free(None, size=True, image=IMAGE).names == ({0: BATCH, 2: "height", 3: "width"},)
    assert free("image:2=height,image:3=width", image=IMAGE).names == free(None, size=True, image=IMAGE).names


def test_another_word_for_the_batch_is_the_batch() -> None:
    found = free({"ids": {0: "rows:1..32"}, "mask": {0: "rows"}}, ids=IDS, mask=MASK)
    assert found.names == ({0: BATCH}, {0: BATCH}) and found.sizes == {BATCH: FreeSize(1, 32)}


def test_a_first_dimension_that_counts_something_else_has_its_own_name() -> None:
    assert free({"offsets": {0: "bags"}}, x=(2, 13), offsets=(5,)).names == ({0: BATCH}, {0: "bags"})
    assert free({"offsets": {0: "bags"}}, x=(2, 13), offsets=(2,)).names == ({0: BATCH}, {0: "bags"})


@pytest.mark.parametrize(
    ("said", "inputs", "words"),
    [
        ("idz:1=n", {"ids": IDS}, "no input 'idz'.*\n?.*ids"),
        ("ids:2=n", {"ids": IDS}, r"'ids' \[2, 16\] has no dimension 2"),
        ("n", {"kind": (2,)}, "No input has a dimension 1"),
        ("n", {"ids": IDS, "image": IMAGE}, "Their sizes differ: 'ids' 16, 'image' 3"),
        ({"ids": {1: "n"}, "other": {1: "n"}}, {"ids": IDS, "other": (2, 9)}, "16 in the example of 'ids' and 9 in"),
        ("n:32..64", {"ids": IDS}, r"has 16 for 'n', outside of 32\.\.64"),
        ("ids:1=n:2..64,mask:1=n:2..32", {"ids": IDS, "mask": MASK}, "two ranges"),
    ],
)
def test_what_fits_no_input_is_said_in_a_sentence(said: object, inputs: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        free(said, **inputs)
