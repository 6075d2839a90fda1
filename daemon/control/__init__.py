"""What goes between the supervisor and its children, and the places of its unix sockets."""
