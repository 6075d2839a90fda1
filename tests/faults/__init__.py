"""Tests of failures and attacks: each test tells its story in its docstring."""
