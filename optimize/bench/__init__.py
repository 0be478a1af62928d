"""``optimize bench``: any mix of files and runtimes, timed in lock-step, every sample kept.

`rounds` times opened files in processes of their own, `figures` derives what is shown, `serving` says how a rate is
served in time, and `doubts` what makes a figure doubtful and what to do about it.
"""
