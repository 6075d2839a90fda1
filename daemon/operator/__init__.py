"""What is asked of the whole daemon, by its operator or by clients, and what it shows of itself."""
