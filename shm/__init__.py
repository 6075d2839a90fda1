"""Code that all processes share: errors, datatypes, records, channels, arenas, client regions. It imports no package of ours."""
