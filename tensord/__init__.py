"""tensord serves JAX models to programs on the same machine.

Programs and models import ``tensord.testing``, ``tensord.models`` and ``__version__``. The server's own packages are beside them
(``tensord.config``, ``tensord.daemon``, ``tensord.shm``, ``tensord.workers``): they change without notice. Importing this
package imports none of them.
"""

from __future__ import annotations

#: The version, of which the distribution is as well (setup.cfg). A daemon compares it with that of each process it starts.
__version__ = "0.1.0"
