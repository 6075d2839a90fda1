"""Implements ``triton_python_backend_utils``, which Triton's Python-backend models import."""
