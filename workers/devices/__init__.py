"""The devices on which workers run models: the processor or a GPU, their memory, and host memory that a GPU accesses."""
