"""The error of a call whose tensors or numbers do not fit together."""

from collections.abc import Mapping

# How messages name operands: `OperandError` replaces them by the parameters of the function that
# was called.
A, B, C = "{a}", "{b}", "{c}"


class OperandError(ValueError, RuntimeError):
    """The tensors or numbers of a call do not fit together: shapes, dtypes, devices, layouts,
    memory or gradients.

    It is a ValueError, and a RuntimeError too, because that is what torch raises for such calls.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        super().__init__()
        self.rename({"a": "a", "b": "b", "c": "c"})

    def rename(self, names: Mapping[str, str]) -> None:
        """Names the operands in the message as the function that was called does: `names` has the
        parameter of each of "a", "b" and "c".
        """
        message = self._message
        for operand, name in names.items():
            message = message.replace(f"{{{operand}}}", name)
        self.args = (message,)
