"""Package for the supervisor's child processes: their start, devices, sockets, watchdog, replacement and shutdown."""
