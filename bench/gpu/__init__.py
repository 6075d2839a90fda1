"""The first ten minutes on a GPU: facts of its driver, of XLA on it and of tensord, in one file of JSON and one page."""
