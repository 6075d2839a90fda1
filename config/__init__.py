"""Configuration: the daemon's options and the models' ModelConfig, each validated into one value."""
