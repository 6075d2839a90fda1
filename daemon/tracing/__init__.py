"""This room samples requests, and writes their traces to files."""
