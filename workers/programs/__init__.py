"""Compiled programs: made, kept, stored, chosen and run."""
