"""Package that pushes new parameters into running models, and keeps the pushed parameter sets for workers that start later."""
