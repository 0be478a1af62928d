"""``optimize bench``: any mix of files and runtimes, timed in lock-step, every sample kept.

`subjects` opens what is named, `plan` says how it is timed, `rounds` times it (in `worker` processes, through `crew`),
`figures` derives what is shown, and `doubts` says what makes a figure doubtful and what to do about it.
"""
