from pathlib import Path

import pytest
import yaml

from optimize import Reparameterize, processor, recipe
from optimize.errors import Refused, UsageError

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_survive_a_round_trip(path: Path) -> None:
    found = recipe.read(path)
    assert found.passes and found.targets
    again = path.parent / path.name
    assert recipe.parse(recipe.yaml.safe_load(found.yaml())) == found == recipe.read(again)
    assert [entry.build([]).name for entry in found.passes] == [entry.name for entry in found.passes]


@pytest.mark.parametrize(
    "content, message",
    [
        ("passes: [FuseConvBM]", "There is no pass 'FuseConvBM'.\nDid you mean 'FuseConvBN'"),
        ("passes: [Own]", "SmoothActivations. Name one of your own as package.module:Pass."),
        ("targets: [tensort]", "There is no target 'tensort'.\nDid you mean 'tensorrt'"),
        ("pases: []", "unknown key 'pases'.\nDid you mean 'passes'"),
        ("passes: [{QuantizeStatic: {calibrater: mse}}]", "has no option 'calibrater'.\nDid you mean 'calibrator'"),
        ("passes: [{QuantizeStatic: {calibrator: best}}]", "QuantizeStatic.calibrator = 'best'"),
        ("passes: [{PruneChannels: {ratio: much}}]", "PruneChannels.ratio = 'much'"),
        ("passes: FuseConvBN", "must be a list of pass names"),
        ("threads: many", "threads"),
        ("threads: yes", "threads"),
        ("min_sqnr: .nan", "finite"),
        ("[1, 2]", "a recipe is a mapping"),
        ("passes: [", "is not YAML"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_nearest_name(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        recipe.read(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        'calib: "evil:go"',
        'eval: "this:s"',
        'passes: [{QuantizeAware: {train: "evil:go"}}]',
        'preprocess: "evil:go"',
        'preprocess: " evil:go "',
        'preprocess: "transform=evil:go"',
        'preprocess: {transform: "evil:go"}',
        'preprocess: {transform: ["evil:go"]}',
    ],
)
def test_code_that_a_recipe_names_needs_trust(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil:go").touch()  # a file of that name does not make it one
    path.write_text(content)
    with pytest.raises(Refused, match=r"names Python code: (evil:go|this:s)"):
        recipe.read(path)
    assert recipe.read(path, trust=True)


def test_a_pass_goes_by_its_module_and_class(tmp_path: Path) -> None:
    """Which a recipe needs trust for, as for any code; what is no pass is refused."""
    path = tmp_path / "recipe.yaml"
    path.write_text('passes: [{"optimize.passes:QuantizeStatic": {calibrator: mse}}]')
    with pytest.raises(Refused, match="names Python code: optimize"):
        recipe.read(path)
    (entry,) = recipe.read(path, trust=True).passes
    assert entry.takes_data and recipe.PassEntry.of(entry.build([])).name == "QuantizeStatic"
    with pytest.raises(UsageError, match=r"has no option 'calibrater'"):
        recipe.parse({"passes": [{"optimize.passes:QuantizeStatic": {"calibrater": "mse"}}]})
    with pytest.raises(Refused, match=r"'optimize.passes:base' is no pass\."):
        recipe.parse({"passes": ["optimize.passes:base"]})


@pytest.mark.parametrize(
    "content",
    [
        "preprocess: 5",
        "preprocess: []",
        "preprocess: .nan",
        "passes: [{PruneChannels: {ratio: 'nan'}}]",
        "passes: [{QuantizeStatic: {spare: 'inf'}}]",
        "passes: [{PruneChannels: {ratio: '0.5'}}]",
        "passes: [{EqualizeChannels: {unless_near: 'no'}}]",
        pytest.param(f"passes: [{{PruneChannels: {{ratio: [{'a, ' * 5000}]}}}}]", id="long"),
    ],
)
def test_values_of_odd_types_are_wrong_usage(content: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"recipe.yaml: ") as caught:
        recipe.read(path)
    assert len(str(caught.value)) < 1000


def test_several_words_may_be_one_number(tmp_path: Path) -> None:
    (entry,) = recipe.parse({"passes": [{"Reparameterize": {"leave": 5}}]}).passes
    assert entry.build(None) == Reparameterize(leave=("5",))


@pytest.mark.parametrize(
    "content",
    [
        "passes: [{QuantizeStatic: {cache: elsewhere}}]",
        "targets: [openvino]\ntarget_options: {openvino: {cache: elsewhere}}",
        "targets: [tensorrt]\ntarget_options: {tensorrt: {timing_cache: elsewhere}}",
    ],
)
def test_places_that_a_recipe_names_need_trust(content: str, tmp_path: Path) -> None:
    """Something is written there, and what lies there is read: a cache of OpenVINO's is native code."""
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(Refused, match="names a place to write to, and to read what lies there: elsewhere"):
        recipe.read(path)
    assert list(recipe.read(path, trust=True).places) == ["elsewhere"]
    path.write_text(content.replace("elsewhere", "''"))
    assert not list(recipe.read(path).places)


def test_a_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        recipe.read(tmp_path / "none.yaml")


def test_processors_are_read_where_they_are_named() -> None:
    assert recipe.parse({"passes": ["QuantizeStatic"], "cpu": "host"}).cpu == processor.host().level
    found = recipe.parse({"passes": ["PairChannels", {"QuantizeStatic": {"cpu": "avx2"}}], "cpu": "vnni"})
    made = [entry.build([[0.0]], cpu=found.cpu) for entry in found.passes]
    assert [vars(entry)["cpu"] for entry in made] == ["vnni", "avx2"]  # what a pass is told by itself comes first
    with pytest.raises(UsageError, match="no processor 'vni'") as raised:
        recipe.parse({"passes": ["QuantizeStatic"], "cpu": "vni"})
    assert "Did you mean 'vnni'" in str(raised.value)


def test_emulated_processors_need_integers() -> None:
    found = recipe.parse({"passes": ["QuantizeStatic"], "verify_on": "avx2,sse4"})
    assert found.verify_on == ("avx2", "sse4") and recipe.parse(yaml.safe_load(found.yaml())) == found
    for content, said in (
        ({"passes": ["FuseConvBN"], "verify_on": ["avx2"]}, "no pass quantizes"),
        (
            {"passes": ["QuantizeStatic"], "verify_on": ["avx"]},
            "Did you mean 'avx2'",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            recipe.parse(content)
