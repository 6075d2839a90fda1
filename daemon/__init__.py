"""The daemon tensord: its command-line programs and its supervisor; the other parts are in subpackages."""
