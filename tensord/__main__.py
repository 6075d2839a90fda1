"""``tensord`` and ``tensorctl``, once it is known that what they import is ours; ``python -m tensord`` is the first.

They stand here because no other distribution has a package of this name: in one of ours, another's ``__init__.py`` would run
before anything could be said of it.
"""

from tensord import installation


def tensord() -> None:
    """The daemon's command line."""
    installation.check("tensord")
    from daemon.cli import main

    main(prog_name="tensord")


def tensorctl() -> None:
    """The operator's."""
    installation.check("tensorctl")
    from daemon.ctl import main

    main(prog_name="tensorctl")


if __name__ == "__main__":
    tensord()
