"""What only a real GPU can show: values, order on the device, bandwidth, lifetimes. Skipped with a reason where there is none."""
