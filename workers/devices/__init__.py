"""A worker's device, the processor or a GPU, and memory that is the device's or that it reaches by itself."""
