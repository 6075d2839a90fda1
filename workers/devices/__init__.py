"""A worker's device, the processor or a GPU, the memory of the device, and host memory that the device can access."""
