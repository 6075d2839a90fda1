"""Holds what every front needs, whatever protocol it speaks."""
