"""Code for programs that run on a GPU only: gathers inputs in its memory, fetches outputs or delivers them to their places."""
