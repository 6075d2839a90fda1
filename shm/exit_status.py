"""Exit statuses of our children that say more than "it failed"."""

from __future__ import annotations

import os

#: A worker cannot use its device at all, for a reason that another start would not change. Its last line in the log says which.
NO_DEVICE = os.EX_UNAVAILABLE
