"""The daemon: the commands and the supervisor are here, everything else in its room."""
