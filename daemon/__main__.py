"""``tensord`` and ``tensorctl``, once it is known that what they import is ours; ``python -m daemon`` is the first."""

from daemon import installation


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
