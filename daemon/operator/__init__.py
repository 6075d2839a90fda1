"""Package for what operators and clients ask of the whole daemon, such as to load a model, to drain or to show its state."""
