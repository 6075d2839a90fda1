"""Package that answers what operators and clients ask of the whole daemon."""
