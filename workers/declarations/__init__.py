"""What a model says of itself, in its folder and its configuration: read, checked, and written for others to read."""
