"""What one request may cost, counted and not timed: the guard against getting slower by and by."""
