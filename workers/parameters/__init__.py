"""Handles pushed parameter sets of models: checks them, places them on the device, and puts them into use between two batches."""
