"""A server whose answers do not depend on who else is in the batch.

The same request is computed alone and in batches of several sizes. Under
`outblas.batch_invariant()` its bits are the same each time. Without a GPU the kernel `portable`
runs through Triton's interpreter, which is slow, so matrices are small there.

    python examples/batch_invariant_serving.py
"""

import torch
from torch import Tensor

import outblas


class Head:
    """Two layers of a model that serves requests: one row is one token."""

    def __init__(self, width: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = 2, width, width
        weights = torch.randn(shape, generator=generator, device=device) / width**0.5
        self.up, self.down = weights.to(torch.bfloat16 if device == "cuda" else torch.float16)
        # By default a CPU tensor goes to torch, which promises nothing: name a kernel that does.
        self.kernel = None if device == "cuda" else "portable"

    def __call__(self, tokens: Tensor) -> Tensor:
        hidden = outblas.matmul(tokens, self.up, activation="silu", kernel=self.kernel)
        return outblas.matmul(hidden, self.down, residual=tokens, kernel=self.kernel)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device, width, batches = ("cuda", 4096, (1, 7, 64, 500)) if on_gpu else ("cpu", 48, (1, 3, 20))
    head = Head(width, device)
    torch.manual_seed(1)
    request = torch.randn(1, width, device=device).to(head.up.dtype)

    def answers(size: int) -> Tensor:
        """The request's answer, from the middle of a batch of strangers."""
        batch = torch.randn(size, width, device=device).to(head.up.dtype)
        batch[size // 2] = request[0]
        return head(batch)[size // 2]

    def agreeing() -> int:
        """In how many batches the answer has the bits that it has alone."""
        alone = head(request)[0]
        return sum(torch.equal(answers(size), alone) for size in batches)

    print(f"as called:         {agreeing()} of {len(batches)} batches agree to the last bit")
    # [promise]
    with outblas.batch_invariant():
        found = agreeing()
    # [end]
    print(f"batch_invariant(): {found} of {len(batches)} batches agree to the last bit")
    assert found == len(batches)

    if not on_gpu:  # Where torch would compute a call, the promise is refused, not forgotten.
        try:
            with outblas.batch_invariant():
                outblas.matmul(request, head.up)
        except ValueError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main()
