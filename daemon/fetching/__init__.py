"""Package of ``tensord fetch``, which copies a model from a URL into a repository. The daemon itself fetches nothing."""
