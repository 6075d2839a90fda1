"""Parameter sets of models: pushed into a running worker, checked, placed on the device, and exchanged between two batches."""
