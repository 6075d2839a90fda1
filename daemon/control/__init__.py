"""Package for the channels between the supervisor and its child processes, and for the paths of its Unix sockets."""
