"""What is told: records, a document made of each by its command, and three renderers that know no command."""

#: What a run writes beside its artifacts.
FILES = ("report.json", "report.md", "report.html")
#: What makes the same files again, with what was decided by measuring.
RECIPE = "recipe.yaml"
