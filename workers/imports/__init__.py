"""What a model's code sees when it imports: its own modules first, then the environment."""
