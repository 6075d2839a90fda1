"""Compares the version of a child with that of the daemon which started it.

An upgrade replaces files beneath a daemon that runs; what it starts after that would be of the new version. Such a child ends at
once with ``OTHER``, before it has said or read anything, and the supervisor says what to do.
"""

from __future__ import annotations

import os
import sys

from tensord import __version__

#: The variable by which a daemon tells its children, and these theirs, of which version it is.
VARIABLE = "_TENSORD_VERSION"
#: The exit status of a child whose version is not the daemon's.
OTHER = os.EX_CONFIG


def end_if_other() -> None:
    """Ends this process where its daemon is of another version. Call before anything else.

    Raises: SystemExit: with the status OTHER; a sentence is on standard error.
    """
    wanted = os.environ.get(VARIABLE, __version__)
    if wanted != __version__:
        print(f"tensord: this process is of version {__version__}, its daemon of version {wanted}", file=sys.stderr)
        raise SystemExit(OTHER)
