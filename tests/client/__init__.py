"""Tests of client/, which is a distribution of its own and is imported from its folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "client"))
