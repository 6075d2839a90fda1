"""Compares the tensord version of a child process with that of the daemon which started the child.

An upgrade replaces the files under a running daemon, so a child process started afterwards would run the new version. Such a
child exits at once with the status ``OTHER``, before it has sent or read anything; the supervisor logs what the operator has to
do.
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
    """Exits this process if its version is not that of the daemon that started it. Call it before anything else.

    Raises: SystemExit: the versions differ; the exit status is ``OTHER``, by which the daemon knows, and standard error says so.
    """
    wanted = os.environ.get(VARIABLE, __version__)
    if wanted != __version__:
        print(f"tensord: this process is of version {__version__}, its daemon of version {wanted}", file=sys.stderr)
        raise SystemExit(OTHER)
