"""This room has what every front needs, whatever protocol it speaks."""
