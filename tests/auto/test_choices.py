"""What a search may try: every choice once, in an order that finds something early, each as passes that exist."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from optimize import bounds
from optimize.auto import choices
from optimize.auto.choices import CUTS, FileChoice, Sampler, every_target, first_choices, kinds_of
from optimize.auto.trials import FileTrial
from optimize.measure.agreement import Agreement
from optimize.measure.runs import Speedup
from optimize.recipe import check_options
from optimize.registry import find_target
from optimize.report.model import Row

NAMES = ["onnx", "openvino"]


def written_by(name: str) -> tuple[str, ...]:
    """Return the precisions of a target, with those of fewer bits that it stores."""
    kinds, few = find_target(name).support.precisions, ("int7", "int6", "int4") if find_target(name).packs else ()
    return (*kinds, *few, *(("int4-weights",) if "int8-weights" in kinds else ()))


def judged(choice: FileChoice, number: int, ratio: float, sqnr_db: float, size_bytes: int = 1000) -> FileTrial:
    row = Row(
        target=choice.target,
        precision=choice.precision,
        size_bytes=size_bytes,
        speedup=Speedup(ratio, ratio, ratio),
        agreement=Agreement(sqnr_db, 0.0, None),
    )
    return FileTrial(number=number, choice=choice, at_s=float(number), took_s=1.0, row=row)


def test_a_float_file_is_first_and_every_kind_is_tried_once_for_each_target_that_writes_it() -> None:
    found = list(first_choices(NAMES))
    assert found[:3] == [FileChoice("onnx", "float32"), FileChoice("onnx", "int8"), FileChoice("openvino", "int8")]
    written = [(name, kind) for name in NAMES for kind in written_by(name) if kind in kinds_of(NAMES)]
    assert sorted((choice.target, choice.precision) for choice in found) == sorted(written)


def test_any_target_is_one_that_runs_here_and_is_for_deploying() -> None:
    found = every_target()
    assert {"onnx", "openvino"} <= set(found) and not {"eager", "compile", "channels-last"} & set(found)
    assert all(find_target(name).available().run for name in found)


@pytest.mark.parametrize("cut", CUTS[:2])
def test_the_passes_of_every_choice_are_there_and_take_its_options(cut: float) -> None:
    for choice in first_choices(NAMES):
        for entry in replace(choice, cut=cut, spare=False, effort="best").passes("any"):
            check_options(entry, source="test")


def test_the_precision_of_a_choice_is_what_its_passes_are_called_by() -> None:
    made = FileChoice("openvino", "int8-bfloat16", spare=False).passes("any")
    assert [entry.name for entry in made][-2:] == ["QuantizeStatic", "CastBF16"]
    assert made[-2].options == {"spare": 0.0} and made[-1].options == {"mixed": True}
    half = FileChoice("onnx", "float16", cut=0.3).passes("any")
    assert [(entry.name, entry.options) for entry in half] == [
        ("PruneChannels", {"ratio": 0.3, "of": "macs"}),
        ("CastFP16", {}),
    ]


def test_a_file_waits_for_nothing_but_what_it_goes_on_from() -> None:
    plain = FileChoice("onnx", "float32", cut=0.3)
    whole = FileChoice("onnx", "int8", effort="best", spare=False, cut=0.3)
    mixed = replace(whole, precision="int8-bfloat16", regain_db=3.0)
    assert (plain.start, whole.start, mixed.start) == (None, plain, whole)
    assert FileChoice("onnx", "bfloat16", cut=0.3).start == FileChoice("onnx", "int8-dynamic", cut=0.3).start == plain
    assert [entry.name for entry in plain.own_passes("any")] == ["PruneChannels"]
    assert [entry.name for entry in mixed.own_passes("any")] == ["CastBF16"]
    assert replace(plain, target="openvino").family == plain.family != FileChoice("onnx", "float16", cut=0.3).family


def test_the_sampler_proposes_everything_once_and_learns_meanwhile() -> None:
    sampler, known = Sampler(["onnx"], CUTS[:1]), set[FileChoice]()
    for number, choice in enumerate(sampler.propose(known), 1):
        assert choice not in known
        known.add(choice)
        sampler.learn(choice, (1 / (1 + choice.spare), -30.0 - choice.regain_db, number), is_allowed=True)
    static = [choice for choice in known if choice.is_static]
    assert {choice.precision for choice in known} == {*written_by("onnx")} & {*kinds_of(["onnx"])}
    few = {"int7", "int6", "int4"}  # of which none spares a layer
    kinds = [
        2 if choice.precision in few else 4
        for choice in {replace(each, effort="", spare=True, regain_db=0.0) for each in static}
    ]
    assert len(static) == sum(kinds) * len(choices.REGAINS)
    assert len(known) == len(static) + len({choice.precision for choice in known if not choice.is_static})


def test_there_are_not_more_shards_than_numbers_for_them() -> None:
    with pytest.raises(ValueError, match="'2/5000' is no part such as 3/8, from 1/8 to 8/8, and of 999 at most"):
        bounds.read_shard("2/5000")


@pytest.mark.parametrize("count", [2, 7])
def test_shards_have_everything_once_and_whole_families(count: int) -> None:
    parts = [list(Sampler(NAMES, CUTS, (number, count)).every()) for number in range(1, count + 1)]
    everything = [choice for part in parts for choice in part]
    assert len(everything) == len({*everything}) and {*everything} == {*Sampler(NAMES, CUTS).every()}
    families = [{choice.family for choice in part} for part in parts]
    assert all(families) and sum(map(len, families)) == len(set.union(*families))
    assert next(Sampler(NAMES, CUTS, (2, count)).propose(())) in parts[1]


def test_the_sampler_follows_what_it_was_told() -> None:
    """INT8 of one target is told to be best in everything: a sixth of what is left, and most of what is proposed."""
    sampler = Sampler(NAMES, CUTS[:1])
    more = [FileChoice(name, "int8", regain_db=regain) for name in NAMES for regain in choices.REGAINS[1:]]
    known = dict.fromkeys([*first_choices(NAMES), *more])
    for choice in known:
        is_best = (choice.target, choice.precision) == ("openvino", "int8")
        figures = (1 / (10.0 + choice.regain_db), -40.0 - choice.regain_db, 100) if is_best else (0.5, -20.0, 1000)
        sampler.learn(choice, figures, is_allowed=True)
    proposed = []
    for choice in itertools.islice(sampler.propose(known.keys()), 10):
        known[choice] = None
        proposed.append((choice.target, choice.precision))
    assert proposed.count(("openvino", "int8")) >= 5


def test_what_is_unusual_is_said() -> None:
    assert FileChoice("onnx", "int8").how == ""
    unusual = FileChoice("onnx", "int8", "best", spare=False, regain_db=1.5, cut=0.15)
    assert unusual.how == "15 % cut, effort best, none spared, 1.5 dB more"
