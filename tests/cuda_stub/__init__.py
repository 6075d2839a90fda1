"""A stand-in for the CUDA driver, to test CUDA regions where no GPU is: it keeps books and does not imitate hardware."""
