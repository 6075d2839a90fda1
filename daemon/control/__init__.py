"""Package for the channels between the supervisor and its child processes, and for the paths of the daemon's Unix sockets."""
