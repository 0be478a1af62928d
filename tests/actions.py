"""The steps of a composite GitHub action, run as a runner would: by bash, with what they are given as variables."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
#: How GitHub starts ``shell: bash``.
BASH = ("bash", "--noprofile", "--norc", "-e", "-o", "pipefail")
_EXPRESSION = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")


def action() -> dict[str, Any]:
    """Return the action of this package."""
    read: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    return read


def scripts() -> dict[str, dict[str, Any]]:
    """Return the steps that are scripts, by name."""
    return {step["name"]: step for step in action()["runs"]["steps"] if "run" in step}


def filled(text: str, inputs: Mapping[str, str], source: Path = ROOT) -> str:
    """Return a text with its expressions evaluated; an input that the action does not declare is an error."""
    declared = action()["inputs"]
    assert set(inputs) <= set(declared)
    values = {f"inputs.{name}": inputs.get(name, entry["default"]) for name, entry in declared.items()}
    values["github.action_path"] = str(source)
    return _EXPRESSION.sub(lambda found: values[found[1]], text)


def run_step(
    name: str, inputs: Mapping[str, str], folder: Path, variables: Mapping[str, str], source: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a step.

    Args:
        name: Of the step.
        inputs: What the workflow gives.
        folder: Where the job works.
        variables: All that the job has; what the step is given comes to them.
        source: Where the action lies.
    """
    step = scripts()[name]
    given = {key: filled(value, inputs, source) for key, value in step["env"].items()}
    script = folder / f"{name}.sh"
    script.write_text(step["run"], encoding="utf-8")
    where = folder / filled(step.get("working-directory", "."), inputs, source)
    return subprocess.run([*BASH, str(script)], cwd=where, env={**variables, **given}, capture_output=True, text=True)
