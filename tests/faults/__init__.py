"""What happens on bad days: each test tells its story in its docstring."""
