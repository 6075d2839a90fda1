"""Names the reasons why a worker answers requests in Python and not in C, each with a sentence for whoever operates the daemon.

A request has none of them if C answers its repeats: it was the first of its kind, or came while others waited in Python.
"""

from __future__ import annotations

import enum


class SlowReason(enum.Enum):
    """The reason why a request is not answered in C. The value is a sentence; ``label`` stands for it in metrics."""

    # Of a model version: they hold for each request to it.
    NOT_COMPILED = "the C extension was not built when tensord was installed"
    INSTANCES = "the model runs in threads or processes of its own, not in the worker's loop"
    STREAMS = "a request to the model may have several responses"
    ORDERED = "the model's answers keep the order of their requests"
    QUEUE = "the model's queue has priorities, a policy, or replaces requests"
    PROPERTIES = "the model has inputs that are made of properties of the request"
    CACHE = "the response cache is used for the model"
    DATATYPES = "the model has inputs whose bytes are converted: BYTES, BOOL, or with another shape than clients send"
    # Of a kind of requests, or of an ensemble: it is known when one has run.
    CLASSIFICATION = "the requests want outputs as class labels"
    NEW = "the requests were the first of their kind, or of ever other shapes, or a model or a region had just changed"
    INSIDE = "the requests were made by a model or by a step of an ensemble"
    TRACED = "the requests were traced before an answer to one without a trace was known"
    PARAMETERS = "the requests use or name another parameter set than the newest main"
    REGIONS = "the requests have tensors in regions of a GPU, or empty ones, or a sequence whose tensors are in regions"
    STEPS = "the steps of the ensemble run as requests to their models"
    LARGE = "the tensors are large or on a GPU, and the program can neither read nor write them where they are"
    UNFIT = "no run of C fits: the requests are padded, leave out inputs, have too many tensors, or are large and share runs"

    @property
    def label(self) -> str:
        """The reason's name, in lower case."""
        return self.name.lower()
