"""What a search tells beside its rows: everything that was tried, and when the best was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optimize import wording as form
from optimize.report import document as doc
from optimize.report.charts import Mark, Plot, linear_axis
from optimize.report.model import Report, TrialFigures

_MINUTE_S = 60.0


def searched(report: Report) -> Iterator[doc.Section]:
    """Yield what a search tried for its rows: in a line for a terminal, every trial for pages."""
    if (search := report.search) is None:
        return
    tried, kept = form.plural(len(search.trials), "file"), len(report.rows)
    facts = [("Tried", f"{tried} in {form.span(search.spent_s)}, {kept} on the front. {search.ended.capitalize()}.")]
    if search.best and not report.doubt:
        facts.append(("Best" if search.met else "Nearest to what was asked", search.best))
    yield doc.Facts(tuple(facts))
    rows = [
        (
            f"{trial.number}  {trial.name}",
            form.span(trial.at_s),
            form.span(trial.took_s),
            form.ratio(trial.ratio),
            form.decibels(trial.sqnr_db),
            form.size(trial.size_bytes),
            trial.outcome,
        )
        for trial in search.trials
    ]
    columns = ("Trial", "Done at", "Took", "vs eager", "SQNR", "Size", "What became of it")
    yield doc.Charts(tuple(curve(search.trials)), title="The search")
    yield doc.grid(columns, rows, title="Everything that was tried", left=columns[-1:], on=doc.PAGES)


def curve(trials: Sequence[TrialFigures]) -> Iterator[doc.Chart]:
    """Yield how fast the fastest file was that had been found by each minute; nothing with fewer than two."""
    known = [(trial.at_s / _MINUTE_S, trial.ratio, trial.name) for trial in trials if trial.ratio is not None]
    if len(known) < 2:
        return
    steps, best = list[tuple[float, float]](), 0.0
    for at, ratio, _ in known:
        if ratio > best:
            steps += [(at, best), (at, ratio)] if best else [(at, ratio)]
            best = ratio
    steps.append((known[-1][0], best))
    dots = (Mark("dot", ((at, ratio),), 0, title=f"{name}: {form.ratio(ratio)}", size=3) for at, ratio, name in known)
    x = linear_axis(0.0, known[-1][0], title="minutes of the search")
    y = linear_axis(0.0, 1.1 * best, title="× eager")
    plot = Plot("The fastest file found so far", x, y, (Mark("line", tuple(steps)), *dots))
    yield doc.Chart(plot, plot.name, "every dot is a file that was made, judged and timed")
