"""This room has the channels between the supervisor and its children, and the paths of its unix sockets."""
