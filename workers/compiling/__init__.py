"""Processes that compile for a worker what it has traced: a compiler that dies takes one model's load with it, and no worker."""
