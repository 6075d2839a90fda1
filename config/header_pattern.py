"""Compiles the RE2 pattern of request headers that are forwarded to models: matching takes linear time, whatever clients send."""

from __future__ import annotations

from typing import Any


def compiled(pattern: str) -> Any:
    """Compiles an RE2 pattern that ignores case. Raises ValueError with the reason if the pattern is malformed."""
    # RE2 is imported late: few servers forward headers; the others, and processes that only read the configuration, need it not.
    import re2

    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"{pattern!r} is no RE2 pattern: {text}") from None
