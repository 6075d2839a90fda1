"""``python -m daemon``: the same as ``tensord``."""

from daemon.cli import main

if __name__ == "__main__":
    main(prog_name="tensord")
