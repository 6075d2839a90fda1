"""The supervisor's child processes: their start, their devices and sockets, watch, replacement and shutdown."""
