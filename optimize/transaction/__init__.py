"""Several files into one folder as one transaction: all of them or none, whatever happens, and nobody else's lost.

The files are made in a hidden folder beside ``--out``. To commit, that folder is completed with hard links to what the
new result does not replace, and exchanged for the old one in a single rename. What appeared in the old one meanwhile
is brought over, and then it goes. ``commit.Transaction.settle`` alone decides, by what lies on the disk, what became
of a transaction: it ends every one of our own and every one whose process was killed.

=====================================  ==================================================================
the folder is not there                a rename that refuses to replace anything
it is                                  exchange of folders (Linux 3.15; nearly every local file system)
its file system cannot exchange        two renames; killed between them, the next run puts the old one back
it is a mount point, a shell is in     files move one by one, and back if one cannot; killed between them, the
it, or it holds what has no links      next run puts the old ones back
no locks (Windows, some networks)      the same, but nothing is taken for dead, so that left-overs stay
=====================================  ==================================================================
"""

from optimize.transaction.commit import ENDINGS, among, check, check_own, found, staging

__all__ = ["ENDINGS", "among", "check", "check_own", "found", "staging"]
