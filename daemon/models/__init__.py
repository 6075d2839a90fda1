"""Package that decides which models are to be loaded and keeps the state of every model over all worker processes."""
