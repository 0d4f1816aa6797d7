"""What a run on the model raises."""


class ProtocolFault(Exception):
    """A run that went wrong. `kind` is one of "deadlock", "early read", "overwritten", "unreleased
    stage", "arrivals", "exit" and "wrong result".
    """

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
