"""A stand-in for the CUDA driver, so that CUDA regions are tested where no GPU is: bookkeeping, not hardware."""
