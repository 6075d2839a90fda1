"""Measures requests that all differ: the rows, the requests, their right answers, and the client in C that sends them."""
