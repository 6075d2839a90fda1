"""Package that brings new parameters into running models: which sets there are, how they are pushed, and what is kept of them."""
