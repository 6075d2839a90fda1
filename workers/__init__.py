"""The worker process: queues, batches and runs models on one device. Only this package may import jax."""
