"""Describes a model's own exception for its author: type, message, and the line of the model's files that it comes from."""

from __future__ import annotations

import gc
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from tensord.workers.programs.purity import LEAKED

#: The most characters of a model's own exception that a client gets.
_MAX_REASON = 1000
#: A link, which stays, or a path of this host: in quotes with whatever is in it, or to the end of a word.
_LINK_OR_PATH = re.compile(
    r"\b(?:https?|ftp|gs|s3|grpcs?|wss?)://[^/\s'\"][^\s'\"]*"
    r"|(?<=(?P<quote>['\"]))/[^'\"]+(?=(?P=quote))"
    r"|(?<![\w.])/[^\s'\"():,;]+"
)


def describe_exception(error: BaseException, folders: Sequence[Path] = ()) -> str:
    """Describes an exception of a model's code: type and message, on one line and without this host's paths.

    ``folders``: the folders of the version and the model; files in them are named by relative path, with the line that failed.
    """
    # Where it is comes behind it, as for any other.
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    reason = _LINK_OR_PATH.sub(lambda found: "<path>" if found[0].startswith("/") else found[0], text)
    reason = bounded(reason, _MAX_REASON)
    said = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return said + _line(error, folders)


def described_failure(error: BaseException, folders: Sequence[Path]) -> str:
    """Returns the text for an error that made a load fail.

    ``folders``: the folders of the model version and of the model. The text names the files in them by relative paths.
    """
    if type(error).__name__ == "UnexpectedTracerError":
        return f"UnexpectedTracerError: {LEAKED}{_line(error, folders)}"
    said = describe_exception(error, folders)
    name = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(name, str) and not os.path.isabs(name) and (folders[0] / name).exists():
        said += f"; '{name}' lies in the version's folder, which create() gets: path / '{name}'"
    return said


def _line(error: BaseException, folders: Sequence[Path]) -> str:
    """Returns the line in the files of ``folders`` from which ``error`` comes, as " (FILE, line N, in NAME)".

    ", in NAME" is left out for a line outside functions. Returns "" if no line of these files is known.
    """
    if isinstance(error, SyntaxError):
        frames = [(error.filename or "", error.lineno, "")]
    else:
        frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    for file, number, function in reversed(frames):
        for folder in folders:
            if file.startswith(f"{folder}/"):
                where = f", in {function}" if function.isidentifier() else ""
                return f" ({file.removeprefix(f'{folder}/')}, line {number}{where})"
    return ""


def bounded(text: str, limit: int) -> str:
    """Returns a text cut to ``limit`` characters, with a note of how many are left out. A shorter text is returned unchanged."""
    more = len(text) - limit
    return text if more <= 0 else f"{text[:limit]}... ({more} more characters)"


def without_frames(error: BaseException) -> BaseException:
    """Removes the traceback and causes from an error, and returns the error. This frees arrays that the frames held."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    gc.collect()
    return error
