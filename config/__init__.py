"""Package that reads and checks the daemon's options and the models' configurations (ModelConfig)."""
