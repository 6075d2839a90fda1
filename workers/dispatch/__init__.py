"""Validates, queues, runs and answers the requests to a worker, all of it in the thread of the worker's event loop."""
