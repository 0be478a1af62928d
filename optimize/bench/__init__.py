"""``optimize bench``: any mix of files and runtimes, timed in lock-step, every sample kept.

`plan` says how opened files are timed, `rounds` times it (in `worker` processes, through `crew`),
`figures` derives what is shown, and `doubts` says what makes a figure doubtful and what to do about it.
"""
