"""Code for programs that run on a processor only: in host memory, some with one thread, compiled in other processes."""
