"""The error of a call whose tensors or numbers do not fit together."""

from collections.abc import Mapping

# How messages name operands: `OperandError` replaces them by the parameters of the function that
# was called.
A, B, C = "{a}", "{b}", "{c}"


class OperandError(ValueError, RuntimeError):
    """An error for tensors or numbers of a call that do not fit together.

    They differ in shape, dtype, device or layout, share memory, or need gradients that do not
    exist. The message names the argument, what was expected and what was given.

    It is a ValueError, and also a RuntimeError, because torch raises a RuntimeError for such
    calls.

    Example:
        >>> import torch, outblas
        >>> try:
        ...     outblas.matmul(torch.ones(2, 3), torch.ones(4, 5))
        ... except outblas.OperandError as error:
        ...     print(error)
        input.shape[1] is 3 but other.shape[0] is 4
    """

    def __init__(self, message: str) -> None:
        self._message = message
        super().__init__()
        self.rename({"a": "a", "b": "b", "c": "c"})

    def rename(self, names: Mapping[str, str]) -> None:
        """Name the operands in the message as the function that was called names them.

        Args:
            names: The parameter that each of "a", "b" and "c" has there.
        """
        message = self._message
        for operand, name in names.items():
            message = message.replace(f"{{{operand}}}", name)
        self.args = (message,)
