"""What every front has, whatever protocol it speaks."""
