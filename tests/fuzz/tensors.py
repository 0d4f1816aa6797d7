"""Tensors as a description asks for them: values, strides, lazy bits, kinds, and what memory they
share.
"""

import math

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-45, 1e30, 1.0]


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


class Function(torch.Tensor):
    """A subclass that notes the functions that it is handed to."""

    called: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Function.called.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Duck:
    """No tensor, but one that torch's functions hand themselves to."""

    shape, dtype = torch.Size((2, 2)), torch.float32

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "handled", func.__name__


def values(shape, dtype, fill, seed):
    """Contiguous, on the CPU; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    if fill == "nan":  # memory to write to
        return torch.full(shape, 7 if is_exact else math.nan).to(dtype)
    if fill == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if fill == "positive":
        return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.25).to(dtype)
    if is_exact:
        low = 0 if dtype in (torch.uint8, torch.bool) else -3
        return torch.randint(low, 4, shape, generator=generator).to(dtype)
    if fill == "integers":
        found = torch.randint(-4, 5, shape, generator=generator).to(torch.float64)
        other = torch.randint(-4, 5, shape, generator=generator).to(torch.float64)
    else:
        found = torch.randn(shape, generator=generator, dtype=torch.float64)
        other = torch.randn(shape, generator=generator, dtype=torch.float64)
    if fill == "special" and found.numel():
        flat = found.view(-1)
        count = 1 + flat.numel() // 8
        places = torch.randint(0, flat.numel(), (count,), generator=generator)
        chosen = torch.randint(0, len(SPECIAL), (count,), generator=generator)
        flat[places] = torch.tensor(SPECIAL, dtype=torch.float64)[chosen]
    return torch.complex(found, other).to(dtype) if dtype.is_complex else found.to(dtype)


def lay(shape, dtype, layout, fill, seed, device="cpu", room=0):
    """A tensor of this shape that lies as asked, in memory that is a little larger in some
    layouts.
    """
    rank = len(shape)

    def fresh(shape):
        found = values(tuple(shape), dtype, fill, seed)
        return found.to(device)

    if layout == "transposed" and rank > 1:
        order = list(range(rank))
        order = [*order[:-2], rank - 1, rank - 2] if seed % 3 else order[::-1]
        inverse = [order.index(i) for i in range(rank)]
        return fresh([shape[i] for i in order]).permute(inverse)
    if layout == "steps" and rank:
        steps = [1 + (seed >> 2 * i) % 3 for i in range(rank)]
        whole = fresh([2 + n * step for n, step in zip(shape, steps, strict=True)])
        return whole[
            tuple(slice(1, 1 + n * step, step) for n, step in zip(shape, steps, strict=True))
        ]
    if layout == "offset":
        count = math.prod(shape)
        start = 1 + seed % 5
        return fresh([count + start + 3])[start : start + count].view(shape)
    if layout == "expanded" and rank:
        repeated = [seed >> i & 1 for i in range(rank)]
        repeated = repeated if any(repeated) else [1] + [0] * (rank - 1)
        return fresh([1 if again else n for n, again in zip(shape, repeated, strict=True)]).expand(
            shape
        )
    if layout == "overlapping" and rank:
        strides = [1 + (seed >> i) % 2 for i in range(rank)]
        span = 1 + sum(max(n - 1, 0) * step for n, step in zip(shape, strides, strict=True))
        return fresh([span]).as_strided(tuple(shape), strides)
    if layout == "imag":
        wide = torch.complex64 if dtype == torch.float32 else torch.complex128
        whole = values(tuple(shape), wide, fill, seed).to(device)
        return whole.conj().imag if seed % 2 else whole.imag
    if room:
        count = math.prod(shape)
        return fresh([count + room])[:count].view(shape)
    return fresh(shape)


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements share memory, exactly."""
    if not t.numel():
        return False
    places = torch.zeros(t.shape, dtype=torch.int64)
    for dim, stride in enumerate(t.stride()):
        shape = [-1 if i == dim else 1 for i in range(t.dim())]
        places = places + (torch.arange(t.shape[dim]) * stride).view(shape)
    return places.unique().numel() < t.numel()


def _shares(spec: dict, of: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in the memory of another, from an element of it on; the other itself if
    it fits.
    """
    dtype, shape = getattr(torch, spec["dtype"]), tuple(spec["shape"])
    if "from" not in spec and of.dtype == dtype and tuple(of.shape) == shape:
        return of
    storage = of.untyped_storage()
    room = storage.nbytes() // dtype.itemsize
    start = min(spec.get("from", 0), max(room - math.prod(shape), 0))
    if start + math.prod(shape) > room:
        # It has too little memory: apart, then.
        return torch.full(shape, 7.0).to(dtype).to(of.device)
    empty = torch.empty(0, dtype=dtype, device=of.device)
    return empty.set_(storage, start, shape)  # type: ignore[call-overload]  # its stub asks for strides


def base(spec: dict, device: str = "cpu") -> torch.Tensor:
    """Plain: the shape, the values and the strides, and lazy bits."""
    dtype = getattr(torch, spec["dtype"])
    lazy = spec.get("lazy", "")
    t = lay(
        spec["shape"],
        dtype,
        spec["layout"],
        spec.get("fill", "normal"),
        spec["seed"],
        device,
        spec.get("room", 0),
    )
    if "conj" in lazy:
        t = t.conj()
    if "neg" in lazy:
        t = torch._neg_view(t)
    return t


def build(
    specs: dict, device: str = "cpu", needs: tuple = (), mode: FakeTensorMode | None = None
) -> dict:
    """All tensors of a call; `needs` names those that need gradients."""
    built: dict = {}
    for name in sorted(specs, key=lambda name: "alias" in specs[name]):
        spec = specs[name]
        kind = spec.get("kind", "")
        of = built.get(spec.get("alias"))
        if kind == "inference":
            with torch.inference_mode():
                t = base(spec, device)
        elif type(of) is torch.Tensor and of.layout == torch.strided and not of.is_meta:
            t = _shares(spec, of.detach() if of.requires_grad else of)
        else:
            t = base(spec, device)
        built[name] = _of_kind(
            t, kind, spec, mode, name in needs or spec.get("requires_grad", False)
        )
    return {name: built[name] for name in specs}


def _of_kind(t, kind, spec, mode, grows):
    if kind in ("list", "float", "None", "numpy"):
        objects = {"list": [[1.0, 2.0]], "float": 2.5, "None": None}
        return _numpy(t) if kind == "numpy" else objects[kind]
    if kind == "duck":
        return Duck()
    if kind == "meta":
        t = t.to("meta")
    elif kind == "fake":
        t = mode.from_tensor(t)
    elif kind == "cow":
        t = torch._lazy_clone(t)
    elif kind == "sparse":
        t = t.to_sparse() if spec["seed"] % 2 else t.to_sparse_csr()
    elif kind == "nested":
        layout = torch.jagged if spec["seed"] % 2 else torch.strided
        parts = [part[: max(1, len(part) - i)] if len(part) else part for i, part in enumerate(t)]
        t = torch.nested.nested_tensor(parts, layout=layout) if parts else t
    elif kind == "two":
        t = t.contiguous().clone()
        t = TwoTensor(t, t.clone())
    elif kind == "subclass":
        t = t.as_subclass(Tagged)
    elif kind == "function":
        t = t.as_subclass(Function)
    if kind == "parameter":
        return torch.nn.Parameter(t, requires_grad=grows)
    if grows:
        is_view = t._base is not None or not t.is_leaf
        t = (t.detach() if is_view else t).requires_grad_()
    return t


def _numpy(t):
    is_narrow = t.dtype in (torch.bfloat16, torch.float16) or t.dtype.itemsize == 1
    return (t.float() if is_narrow else t).cpu().numpy()
