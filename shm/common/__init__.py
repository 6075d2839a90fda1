"""Holds what ``tensord_client`` and the daemon share: a model as a function, a request under way, errors, datatypes.

The client is installed with a copy: ``client/tensord_client/common``.

Python 3.9, the standard library and numpy; modules import each other by relative imports only, as the package has two names.
"""
