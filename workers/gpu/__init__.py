"""What exists only where programs run on a GPU: gathered in its memory, their outputs fetched or delivered from there."""
