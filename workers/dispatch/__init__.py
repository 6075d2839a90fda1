"""Takes a request through the worker: validates, queues, runs and answers it."""
