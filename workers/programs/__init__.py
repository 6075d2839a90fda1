"""Makes, stores, chooses and runs compiled programs of models."""
