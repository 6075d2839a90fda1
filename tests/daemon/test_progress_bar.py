"""The bar on a terminal: one line, never longer than the terminal, over which the next line is written."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios

from tensord.daemon.progress_bar import ProgressBar


def test_one_line_of_a_terminal() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with open(theirs, "w", encoding="utf-8") as stream:
        bar = ProgressBar(stream)
        bar.draw(3, 4, "compiling minilm 4/9, 2 from the cache")
        bar.draw(3, 4, "compiling minilm 4/9, 2 from the cache")
        bar.clear()
        bar.clear()
        stream.write("|")
        stream.flush()
        shown = b""
        # A terminal gives what it has by then.
        while not shown.endswith(b"|"):
            shown += os.read(ours, 4096)
    os.close(ours)
    assert shown == b"\r\x1b[K[###############-----]  3/4 models  compiling minilm 4/9, 2\r\r\x1b[K|"


def test_nothing_elsewhere() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    bar.draw(1, 2, "loading digits")
    bar.clear()
    assert stream.getvalue() == ""
