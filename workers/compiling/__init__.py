"""Processes that compile what a worker has traced: a compiler that dies fails one model's load, and takes no worker with it."""
