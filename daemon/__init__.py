"""The supervisor and its command line; the HTTP front lives in daemon.http."""
