"""``tensord fetch``: brings a model from elsewhere into a repository. A command of its own: the daemon fetches nothing."""
