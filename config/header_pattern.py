"""The pattern of headers that are forwarded to models, as RE2 reads it: matching takes linear time whatever clients send."""

from __future__ import annotations

from typing import Any


def compiled(pattern: str) -> Any:
    """A compiled RE2 pattern that ignores case. Raises ValueError: what is wrong with it."""
    # Few servers forward headers; the others, and processes that only read the configuration, need not load RE2.
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
