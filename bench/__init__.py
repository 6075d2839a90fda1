"""The measured claims, re-runnable: ``make bench``."""
