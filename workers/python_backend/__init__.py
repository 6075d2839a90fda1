"""``triton_python_backend_utils``: what Triton's Python-backend models import."""
