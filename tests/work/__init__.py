"""Tests of what one request costs, counted and not timed, so that the code does not get slower little by little."""
