"""Holds what the daemon and ``tensord_client`` share. The client is installed with a copy: ``client/tensord_client/common``.

Python 3.9, the standard library and numpy; modules import each other by relative imports only, as the package has two names.
"""
