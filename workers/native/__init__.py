"""What is written in C, with its faces in Python; without a compiler the worker does without."""
