"""Tests of what only a real GPU can show: values, order on the device, bandwidth, lifetimes. Skipped where there is none."""
