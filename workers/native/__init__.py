"""The parts of the worker that are written in C, with their types for Python; a worker without them does all in Python."""
