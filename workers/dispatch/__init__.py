"""Takes a request through the worker: validates, queues, runs and answers it. All of it in the thread of the worker's loop."""
