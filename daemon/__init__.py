"""The daemon: commands and the supervisor here, everything else in its room."""
