"""The published protocol files, and the messages that are compiled from them (docs/decisions/protocol-files.md)."""
