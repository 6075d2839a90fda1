"""What models say of themselves."""
