"""Clients that mean harm, a module for each way to reach the daemon.

Each attack goes on for its time and counts what happened, so that a reader sees that there was one.
"""
