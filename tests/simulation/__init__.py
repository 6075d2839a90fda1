"""The whole daemon in one process, under one seed: who runs next, what time it is and who dies are drawn from it."""
