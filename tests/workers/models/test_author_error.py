"""Tests what an author is told of an exception of their model."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.models.author_error import describe_exception, described_failure


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (ValueError(), "ValueError"),
        (OSError(2, "No such file", "/etc/a b"), "FileNotFoundError: [Errno 2] No such file: '<path>'"),
        (
            ValueError(
                "in /srv/m.py: See https://docs.jax.dev/en/latest/errors.html#jax.errors.X and 'http://[::1]/a b'"
            ),
            "ValueError: in <path>: See https://docs.jax.dev/en/latest/errors.html#jax.errors.X and 'http://[::1]/a b'",
        ),
        (
            ValueError('"/srv/a b" /c, file:///srv/d http:///srv/e'),
            'ValueError: "<path>" <path>, file:<path> http:<path>',
        ),
        (ValueError("it's '/a', isn't it '/b'?"), "ValueError: it's '<path>', isn't it '<path>'?"),
        (
            RuntimeError("in /srv/models/m/1/model.py, line 3:\n  1/2 of a/b"),
            "RuntimeError: in <path>, line 3: 1/2 of a/b",
        ),
    ],
)
def test_descriptions_have_no_paths(error: Exception, text: str) -> None:
    assert describe_exception(error) == text


def test_the_authors_own_line(tmp_path: Path) -> None:
    """The last one that is theirs, however deep it was called and whatever was called there."""
    (tmp_path / "model.py").write_text("import helper\n\ndef apply():\n    return helper.load()\n")
    (tmp_path / "helper.py").write_text(
        textwrap.dedent(
            f"""
            import json

            def load():
                try:
                    json.loads("{{")
                finally:
                    open("{tmp_path}/w.npz")
            """
        )
    )
    imports = ModelImports.of_version("m", (tmp_path,))
    try:
        model = imports.run(tmp_path / "model.py")
        with pytest.raises(FileNotFoundError) as raised:
            model.apply()
    finally:
        imports.forget()
    text = "FileNotFoundError: [Errno 2] No such file or directory: 'w.npz' (helper.py, line 8, in load)"
    assert describe_exception(raised.value, (tmp_path,)) == text
    assert describe_exception(ValueError("from elsewhere"), (tmp_path,)) == "ValueError: from elsewhere"


def test_a_value_of_another_trace(tmp_path: Path) -> None:
    class UnexpectedTracerError(Exception):
        pass

    said = described_failure(UnexpectedTracerError("Encountered an unexpected tracer. A function ..."), (tmp_path,))
    assert said.startswith("UnexpectedTracerError: a value of one trace of the function is kept outside of it")
    assert said.endswith("return it as an output, keep it as state of a sequence, or compute it in create()")


def test_a_line_that_is_no_python(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1\ndef apply(:\n")
    imports = ModelImports.of_version("m", (tmp_path,))
    try:
        with pytest.raises(SyntaxError) as raised:
            imports.run(tmp_path / "model.py")
    finally:
        imports.forget()
    assert describe_exception(raised.value, (tmp_path,)).endswith(" (model.py, line 2)")
