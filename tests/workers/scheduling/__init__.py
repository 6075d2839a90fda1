"""The pure deciders, tested by what they decide."""
