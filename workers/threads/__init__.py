"""Threads that a worker has besides its main loop, and how they communicate with the loop."""
