"""Requests that differ: the rows, the requests, what a right answer says, and the client in C that sends them."""
