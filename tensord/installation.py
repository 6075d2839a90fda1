"""Whether the files that run are those that were installed: config, daemon, shm and workers are names that others use as well.

pip lets a distribution write over the files of another one without a word: python-daemon has a ``daemon/__init__.py`` too. And a
folder of that name that stands earlier on the path hides ours. Either is said in one sentence before anything else is
imported, so this module imports nothing of theirs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import sys
from importlib.metadata import Distribution, PackagePath
from pathlib import Path

_NAME = "tensord"
_ROOMS = ("config", "daemon", "shm", "tensord", "workers")
#: Where our packages are.
_ROOT = Path(__file__).parent.parent


def check(program: str) -> None:
    """Says what is wrong on standard error; ends the process where it cannot work."""
    problem, fatal = hidden() or overwritten() or ("", False)
    if problem:
        print(f"{program}: {problem}", file=sys.stderr)
    if fatal:
        sys.exit(1)


def hidden() -> tuple[str, bool] | None:
    """A sentence about one of our packages that Python finds elsewhere first, and True: nothing of ours can be imported then."""
    for room in _ROOMS:
        spec = importlib.util.find_spec(room)
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
        if (_ROOT / room).resolve() not in [place.resolve() for place in places]:
            other = (spec.origin if spec is not None else None) or ", ".join(map(str, places)) or "nothing"
            return (
                f"the package '{room}' is {other} here and not tensord's own: take its folder out of PYTHONPATH, or "
                "install tensord into an environment of its own"
            ), True
    return None


def overwritten(root: Path = _ROOT) -> tuple[str, bool] | None:
    """A sentence about files of ours that another distribution has as well, and whether tensord cannot work with it.

    Ours in an ``__init__.py`` is but a docstring: with another's in its place tensord works, if what it imports is there.
    """
    ours = _distribution(root)
    if ours is None:
        return None
    lost = [path for path in _files(ours) if not _is_as_recorded(path)]
    if lost:
        others = _owners(ours, lost)
        if others:
            one = f"{others} wrote its own over {_shown(lost)}"
        else:
            lost = [path for path in lost if not Path(path.locate()).exists()]
            one = f"{_shown(lost)} is missing, as after another distribution with a file of that name was uninstalled"
        advice = "install it again (pip install --force-reinstall --no-deps tensord) in an environment of its own"
        return (f"{one}: {advice}", any(path.name != "__init__.py" for path in lost)) if lost else None
    both = [path for path in _files(ours) if path.name == "__init__.py" and len(path.parts) == 2]
    if others := _owners(ours, both):
        return (
            f"{others} has files of the same names and does not work beside tensord: give each an environment of its own",
            False,
        )
    return None


def _distribution(root: Path) -> Distribution | None:
    """What was installed where this module is; None: it is run from a checkout."""
    try:
        found = importlib.metadata.distribution(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if Path(str(found.locate_file(""))).resolve() == root.resolve() else None


def _files(distribution: Distribution) -> list[PackagePath]:
    """Those of our packages whose content is on record."""
    return [path for path in distribution.files or () if path.hash is not None and path.parts[0] in _ROOMS]


def _is_as_recorded(path: PackagePath) -> bool:
    assert path.hash is not None
    try:
        digest = hashlib.new(path.hash.mode, Path(path.locate()).read_bytes()).digest()
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == path.hash.value


def _owners(ours: Distribution, paths: list[PackagePath]) -> str:
    """Other distributions of the same folder that have files of those names, with their versions; "": none."""
    home = str(ours.locate_file(""))
    lines = [f"\n{path}," for path in paths]
    found = set()
    for other in importlib.metadata.distributions(path=[home]):
        # The text of its record, because reading thousands of them line by line would take longer than all the rest.
        record = "\n" + (other.read_text("RECORD") or "")
        if other.metadata["Name"] != _NAME and any(line in record for line in lines):
            found.add(f"{other.metadata['Name']} {other.version}")
    return " and ".join(sorted(found))


def _shown(paths: list[PackagePath]) -> str:
    first = ", ".join(str(path) for path in paths[:3])
    return first + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
