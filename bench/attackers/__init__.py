"""Clients that attack the daemon, a module for each protocol or way to reach it.

Each attack goes on for its time and counts what it sent and what happened to it, so that a reader sees that there was an attack.
"""
