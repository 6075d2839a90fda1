"""Requests that models make themselves: who makes them, from whichever thread, and what they wait for."""
