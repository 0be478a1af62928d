"""Whether a mutated model file is ever more than refused: code run, a file changed, a hang, a traceback.

Files of every kind are mutated byte by byte and by their structure, and opened by the rules of the product in confined
processes; a sample goes through the doors that a user has. Every case is made from its kind, seed and number alone, so
that any of them can be made again. Capturing takes a hundred times as long as reading; ``--every 0`` leaves it out:

    python -m benchmarks.fuzz_loading [--kind pt2] [--cases 100000] [--seconds 600] [--jobs 2] [--seed 0] [--doors 200]
        [--every 40]
    python -m benchmarks.fuzz_loading --kind pt2 --seed 0 --case 1234 --write DIR

"late", "crash" and "memory" are ends of the confined process, which the user's makes a refusal of; each is broken where
the step belongs to the user's process. "unforeseen" are errors of libraries in the confined process, refused there.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from optimize.sandbox import ChildLimits
from tests.fuzzing import campaign, honest
from tests.fuzzing.batch import DEEP
from tests.fuzzing.kinds import KINDS

_COLUMNS = ("opened", "refused", "unforeseen", "memory", "late", "crash", "traceback", "unlisted", "marker")
#: Of the process that a user has.
MOST_MEMORY_MB = 1024
#: Cases that ended the confined process, tried again through a user's door.
_REPLAYED = 10
_DOOR_S = 240.0


def run_kind(kind: str, files: Path, given: argparse.Namespace) -> campaign.Tally:
    """Open the cases of a kind, in so many processes at once, until there is no time left."""
    end = time.monotonic() + given.seconds

    def run(span: campaign.Span) -> campaign.Tally:
        over = time.monotonic() > end
        return campaign.Tally() if over else campaign.drive([span], files, given.seed, deep=given.every)[kind]

    with ThreadPoolExecutor(given.jobs) as pool:
        return campaign.Tally().join(pool.map(run, campaign.spans(kind, given.cases)))


def through_doors(kind: str, files: Path, seed: int, numbers: Iterable[int]) -> dict[str, Any]:
    """Open cases as a user does, in a process of their own that is not confined."""
    chosen = list(numbers)
    limits = ChildLimits(None, None, 60.0 + _DOOR_S * len(chosen), 1 << 30)
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        wanted = {"kind": kind, "seed": seed, "numbers": chosen, "honest_files": str(files)}
        found: dict[str, Any] = campaign.ask(
            "tests.fuzzing.doors:run", Path(name), limits, confined=False, **wanted
        ).value
    return found


def judge(kind: str, files: Path, given: argparse.Namespace) -> bool:
    """Try a kind and print its line; return whether every promise was kept."""
    begun = time.monotonic()
    tally = run_kind(kind, files, given)
    took_s = time.monotonic() - begun
    counts = " ".join(f"{tally.outcomes[name]:>10}" for name in _COLUMNS)
    print(f"{kind:<12} {tally.cases:>7} {counts} {took_s:>8.0f} {tally.cases / took_s:>8.0f}", flush=True)
    for (outcome, reason), count in tally.reasons.most_common(given.reasons):
        print(f"    {count:>7}  {outcome}: {reason}")
    for entry in tally.kept:
        sign = "BROKEN " if entry.is_broken else ""
        print(
            f"    {sign}{entry.outcome} ({entry.whose}) {entry.reason}\n      {_replay(kind, given.seed, entry.number)}"
        )
    ended = [entry.number for entry in tally.kept if entry.whose == "confined"][:_REPLAYED]
    return judge_doors(kind, files, given, ended) and not tally.broken


def judge_doors(kind: str, files: Path, given: argparse.Namespace, ended: list[int]) -> bool:
    """Try a sample, and the cases that ended a confined process, through a user's door."""
    numbers = [*ended, *range(given.cases, given.cases + given.doors)]
    if not numbers:
        return True
    found = through_doors(kind, files, given.seed, numbers)
    ends = ", ".join(f"{count} {name}" for name, count in found["outcomes"].items())
    print(
        f"    a user's door: {ends}; {found['memory_mb']:.0f} MB, the longest {found['longest_s']:.1f} s, "
        f"{found['seconds']:.0f} s in all",
        flush=True,
    )
    for number, outcome, reason in found["broken"]:
        print(f"    BROKEN {outcome} at a user's door: {reason}\n      {_replay(kind, given.seed, number)}")
    return not found["broken"] and found["memory_mb"] < MOST_MEMORY_MB


def _replay(kind: str, seed: int, number: int) -> str:
    return f"python -m benchmarks.fuzz_loading --kind {kind} --seed {seed} --case {number} --write ."


def replay(kind: str, files: Path, given: argparse.Namespace) -> bool:
    """Write one case, and open it by the rules and through a user's door."""
    made = KINDS[kind].mutated(honest.read(files, kind), given.seed, given.case)
    if given.write is not None:
        given.write.mkdir(parents=True, exist_ok=True)
        for name, data in made.items():
            (given.write / name).write_bytes(data)
    span = (kind, given.case, given.case + 1)
    tally = campaign.drive([span], files, given.seed, deep=1 if given.deep else 0)[kind]
    for (outcome, reason), _ in tally.reasons.items():
        print(f"by the rules: {outcome}: {reason}")
    return (
        judge_doors(kind, files, argparse.Namespace(**{**vars(given), "doors": 0}), [given.case]) and not tally.broken
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=sorted(KINDS), action="append", help="one of them, may be given again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a kind, its doors left out")
    parser.add_argument("--case", type=int, help="a single case")
    parser.add_argument("--deep", action="store_true", help="capture and run the single case too")
    parser.add_argument("--write", type=Path, help="folder for the single case")
    parser.add_argument("--every", type=int, default=DEEP, help="one case in so many is captured and run, 0 for none")
    for option, count in (("--cases", 1000), ("--seed", 0), ("--jobs", 1), ("--doors", 0), ("--reasons", 0)):
        parser.add_argument(option, type=int, default=count)
    return parser.parse_args()


def main() -> int:
    """Print a line a kind; end with 1 if a promise was broken."""
    given = _options()
    kinds = given.kind or list(KINDS)
    with tempfile.TemporaryDirectory() as name:
        files = Path(name)
        campaign.prepare(files, kinds)
        if given.case is not None:
            return 0 if replay(kinds[0], files, given) else 1
        print(conditions("onnx", "openvino"), end="\n\n", flush=True)
        names = " ".join(f"{name:>10}" for name in _COLUMNS)
        print(f"{'kind':<12} {'cases':>7} {names} {'seconds':>8} {'a second':>8}")
        kept = [judge(kind, files, given) for kind in kinds]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
