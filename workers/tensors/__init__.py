"""Names, datatypes and shapes of a model's tensors, and how the tensors of several requests lie together in a batch."""
