"""What processes share: errors, datatypes, records, channels, arenas and client regions. It imports no other package of ours."""
