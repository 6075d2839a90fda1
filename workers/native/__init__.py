"""The parts of the worker that are written in C. A worker without them does the same work in Python."""
