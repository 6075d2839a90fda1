"""Stock clients against a real daemon."""
