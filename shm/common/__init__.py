"""Code that ``tensord_client`` and the daemon share: a model as a function, requests in flight, errors, datatypes.

The client is installed with a copy of this package: ``client/tensord_client/common``. The package therefore has two names, and
its modules import each other by relative imports only. They need Python 3.9, the standard library and numpy.
"""
