"""What is told: records, a document made of each by its command, and three renderers that know no command."""

from optimize.transaction import ENDINGS

#: What a run writes beside its artifacts.
FILES = ("report.json", "report.md", "report.html")
#: What makes the same files again, with what was decided by measuring.
RECIPE = "recipe.yaml"
#: What stands in the names of models that a run or a search makes: ``net.int8-weights.onnx``.
PRECISIONS = ("float[0-9]*", "bfloat[0-9]*", "int[0-9]*")
#: What a search writes beside these: what it tried, and for each file of its front the recipe that makes it again.
JOURNAL = "journal.jsonl"
POINTS = tuple(
    f"point-{'[0-9]' * digits}{rest}"
    for digits in (2, 3, 4)
    for rest in (".yaml", *(f".{kind}{end}" for kind in PRECISIONS for end in sorted(ENDINGS)))
)
#: What the other commands write to ``--out``, all or none.
ADVICE = ("advice.json", "advice.html")
BENCH = ("bench.json", "bench.md", "bench.html")
PROFILE = ("profile.json", "roofline.svg", "profile.html")
SENSITIVITY = ("sensitivity.json", "sensitivity.csv", "sensitivity.html")
#: Where GitHub shows Markdown of a step.
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
