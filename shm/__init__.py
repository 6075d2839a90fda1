"""The shared-memory room: errors, datatypes, places, messages, arenas, channels and client regions. Imports nothing of ours."""
