"""The table of differences: read strictly, and excusing no more than it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import differences

HEAD = "# Page\n\n## Differences from Triton\n\n| cases | Triton | tensord | why |\n| --- | --- | --- | --- |\n"


def table(folder: Path, *rows: str) -> differences.Differences:
    page = folder / "protocol.md"
    page.write_text(HEAD + "\n".join(rows) + "\n\n## Next\n\n| `not` | a | row | of it |\n")
    return differences.read(page)


def test_cells_name_ids_globs_and_rules(tmp_path: Path) -> None:
    found = table(tmp_path, "| `one`, `bad_*` | x | y | z |", "| `status 500 → 400: Unable to*` | x | y | z |")
    assert found.cases == ("one", "bad_*")
    assert [rule.name for rule in found.rules] == ["status 500 → 400: Unable to*"]
    assert found.of_case("bad_number") == ["bad_*"]
    assert found.of_case("ones") == []


@pytest.mark.parametrize("row", ["| one | x | y | z |", "| `one` | x | y | |", "| `one` | x | y |"])
def test_a_row_needs_cases_and_a_reason(tmp_path: Path, row: str) -> None:
    with pytest.raises(ValueError, match="a difference is"):
        table(tmp_path, row)


def test_a_page_without_the_section_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "protocol.md"
    page.write_text("# Page\n")
    with pytest.raises(ValueError, match="no section"):
        differences.read(page)


STATUS, CODE = "status 500 → 400: Unable to*", "code INTERNAL → INVALID_ARGUMENT: Unable to*"


@pytest.mark.parametrize(
    ("rule", "line", "excused"),
    [
        (STATUS, 'status: got 400 want 500; body {"error":"Unable to parse \'shape\'"}', True),
        (STATUS, 'step 2: status: got 400 want 500; body {"error":"Unable to parse"}', True),
        (STATUS, 'status: got 404 want 500; body {"error":"Unable to parse"}', False),
        (STATUS, 'status: got 400 want 500; body {"error":"something else"}', False),
        (STATUS, "error: got Unable to parse want Unable to read", False),
        (CODE, "code: got INVALID_ARGUMENT (Unable to parse 'shape') want INTERNAL", True),
        (CODE, "step 2: code: got INVALID_ARGUMENT (Unable to parse) want INTERNAL", True),
        (CODE, "code: got NOT_FOUND (Unable to parse) want INTERNAL", False),
        (CODE, "code: got INVALID_ARGUMENT (something else) want INTERNAL", False),
        ("text Unable to * → shape is *", "error: got shape is 3\n             want Unable to parse shape", True),
        (
            "text Unable to * → shape is *",
            "step 2: details: got shape is 3\n             want Unable to parse shape",
            True,
        ),
        ("text Unable to * → shape is *", "error: got shape is 3\n             want another shape", False),
        ("text Unable to * → shape is *", "error: got it failed\n             want Unable to parse shape", False),
        ('empty body → {"live": true}', ': got {"live": true} want null', True),
        ('empty body → {"live": true}', 'step 1: : got {"live": true} want null', True),
        ('empty body → {"live": true}', 'step 1: body: got {"live": true} want null', True),
        ('empty body → {"live": true}', ': got {"live": false} want null', False),
        ('empty body → {"live": true}', '/live: got {"live": true} want null', False),
        ("added /model_stats/*/copied", "/model_stats/0/copied: unexpected 32", True),
        ("added /model_stats/*/copied", "/model_stats/0/name: unexpected 32", False),
        ("added /model_stats/*/copied", "/model_stats/0/copied: got 1 want 2", False),
    ],
)
def test_a_rule_excuses_its_change_only(rule: str, line: str, excused: bool) -> None:
    found = differences.rule(rule)
    assert found is not None
    assert found.excuses(line) is excused
