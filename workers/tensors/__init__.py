"""Names, datatypes and shapes of a model's tensors, and how those of several requests lie together."""
