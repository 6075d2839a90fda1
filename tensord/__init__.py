"""tensord serves JAX models to programs on the same machine.

Programs and models import ``tensord.testing``, ``tensord.models`` and ``__version__``. The other packages here are the server's
own (``tensord.config``, ``tensord.daemon``, ``tensord.shm``, ``tensord.workers``) and change without notice. Importing this
package imports none of them.
"""

from __future__ import annotations

#: The version, of which the distribution is as well (setup.cfg). A daemon compares it with that of each process it starts.
__version__ = "0.1.0"
