"""What the daemon says to its clients on their unix socket: who they are, their lanes to the workers, memory handed over."""
