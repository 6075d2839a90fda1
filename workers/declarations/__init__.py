"""Reads and checks what models declare in their folders and configurations, and adds it to the configurations."""
