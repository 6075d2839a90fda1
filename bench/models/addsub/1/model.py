"""Sum and difference: as little arithmetic as a model can have, so what is measured is the way there and back."""


def create(path, config, device):
    """No parameters; the inputs of any length, each length compiled when it is first asked for."""

    def apply(params, inputs):
        a, b = inputs["INPUT0"], inputs["INPUT1"]
        return {"OUTPUT0": a + b, "OUTPUT1": a - b}

    return apply, {}
