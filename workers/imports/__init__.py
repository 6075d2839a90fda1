"""What a model's code sees when it imports: its own modules and the environment, never the daemon."""
