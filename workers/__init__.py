"""The worker process: queues, batches and runs models on one device. The only room that may import jax."""
