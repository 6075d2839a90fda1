"""Requests inside the worker, their prepared parts, their submitters and their results."""
