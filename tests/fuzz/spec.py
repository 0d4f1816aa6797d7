"""Descriptions of calls: what `json` can store, and all that is needed to make a call again.

    {"call": "addmm", "tensors": {"a": {...}, "b": {...}, "c": {...}}, "alpha": {...}, ...}

`make` draws one from a seed and an index. What a description leaves out is torch's default.
"""

import math
import random

SIZES = [0, 1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 23, 32]
FLOATS = ["float32", "float64", "bfloat16", "float16"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = ["int64", "int32", "int8", "uint8"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
GATED = ["reglu", "geglu", "geglu_tanh", "swiglu"]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu", *GATED]
CALLS = {
    "matmul": 28,
    "addmm": 18,
    "linear": 15,
    "scaled_mm": 7,
    "Linear": 5,
    "patch": 3,
    "op.matmul": 4,
    "op.matmul_out": 2,
    "op.addmm": 3,
    "op.addmm_out": 2,
    "op.gemm": 4,
    "op.gemm_aux": 2,
    "op.gemm_out": 2,
    "op.scaled_mm": 1,
    "op.activation_backward": 2,
}
SETTINGS = {
    "": 60,
    "no_grad": 2,
    "inference": 3,
    "autocast": 4,
    "default_dtype": 2,
    "default_device": 2,
    "function_mode": 2,
    "dispatch_mode": 2,
    "deterministic": 2,
    "batch_invariant": 1,
}
TRANSFORMS = {"": 84, "vmap": 6, "grad": 4, "vmap grad": 2, "jvp": 3}
KINDS = {  # of one operand, or of all where operands must agree
    "": 70,
    "parameter": 4,
    "subclass": 4,
    "function": 4,
    "two": 2,
    "duck": 1,
    "cow": 6,
    "meta": 3,
    "fake": 3,
    "nested": 6,
    "sparse": 3,
    "list": 1,
    "float": 1,
    "None": 1,
    "numpy": 1,
}
OPAQUE = ("list", "float", "None", "numpy", "duck")  # kinds that are no tensors
WHOLE = ("meta", "fake", "two")  # kinds that all tensors of a call are of together (as a rule)
LAYOUTS = {
    "contiguous": 8,
    "transposed": 5,
    "steps": 3,
    "offset": 2,
    "expanded": 3,
    "overlapping": 2,
    "imag": 1,
}
FILLS = {"normal": 12, "integers": 5, "special": 3, "zeros": 1}
SCALARS = {
    "int": 5,
    "float": 8,
    "zero": 3,
    "numpy float32": 1,
    "numpy float64": 1,
    "numpy int64": 1,
    "tensor": 2,
    "int tensor": 1,
    "bool": 2,
    "nan": 1,
    "inf": 1,
    "complex": 2,
    "huge": 1,
    "string": 1,
    "None": 1,
    "vector": 1,
}
HEAVY = 150  # of so many calls, one is compiled, and one runs in Triton's interpreter


def make(seed: int, index: int, device: str = "cpu") -> dict:
    """The call of this seed and index."""
    rng = random.Random(f"{seed}:{index}")
    heavy = rng.randrange(HEAVY)
    maker = Maker(rng, device, tiny=heavy == 0)
    spec = maker.call(pick(rng, CALLS))
    if heavy == 0 or (device != "cpu" and rng.random() < 0.3):
        maker.name_kernel(spec)
    elif heavy == 1 and maker.compilable(spec):
        spec["compile"] = rng.choice(["eager", "aot_eager"])
    return spec | {"seed": seed, "index": index}


def pick(rng: random.Random, weights: dict) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def is_heavy(spec: dict) -> bool:
    """Whether a call takes seconds: compiled, or interpreted."""
    return bool(spec.get("compile")) or bool(spec.get("kernel"))


def is_fused(spec: dict) -> bool:
    """Whether torch has no one function for a call."""
    extra = ["residual", "aux"]
    extra += [] if spec["call"] in ("linear", "Linear", "patch") else ["bias"]
    return "activation" in spec or "out_dtype" in spec or any(n in spec["tensors"] for n in extra)


def halves(activation: str | None) -> int:
    return 2 if activation in GATED else 1


class Maker:
    """Draws the parts of one call."""

    def __init__(self, rng: random.Random, device: str, *, tiny: bool) -> None:
        self.rng, self.device = rng, device
        self.sizes = [1, 2, 3, 4, 5, 7, 8] if tiny else SIZES
        if device != "cpu" and not tiny:
            self.sizes = [*SIZES, 33, 64, 100, 127, 128, 129, 192, 256, 300]

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    # ---- tensors
    def mostly(self, dtype: str, share: float = 0.96) -> str:
        return dtype if self.chance(share) else self.dtype()

    def dtype(self, *, inexact: bool = False) -> str:
        rng = self.rng
        if inexact or self.chance(0.86):
            return rng.choice([*FLOATS, "float32", *([] if self.chance(0.6) else COMPLEX)])
        return rng.choice([*INTEGERS, *INTEGERS, "bool", *FP8])

    def tensor(self, shape, dtype: str) -> dict:
        layout = pick(self.rng, LAYOUTS)
        if layout == "imag" and dtype not in ("float32", "float64"):
            layout = "contiguous"
        seed = self.rng.randrange(2**31)
        description = {"shape": list(shape), "dtype": dtype, "layout": layout, "seed": seed}
        fill = pick(self.rng, FILLS)
        if fill != "normal":
            description["fill"] = fill
        if self.chance(0.06) and (dtype in COMPLEX or dtype in FLOATS):
            lazy = ["neg", "conj", "neg conj"] if dtype in COMPLEX else ["neg"]
            description["lazy"] = self.rng.choice(lazy)
        return description

    def shapes(self) -> tuple[list[int], list[int]]:
        """Of two operands that torch.matmul multiplies; of one in 16, not."""
        rng = self.rng
        rows, columns, inner = (rng.choice(self.sizes) for _ in range(3))
        rank_a, rank_b = (rng.choices([1, 2, 3, 4], [2, 6, 3, 1])[0] for _ in range(2))
        batch = [rng.choice([0, 1, 2, 2, 3, 3, 5]) for _ in range(max(rank_a, rank_b) - 2)]

        def lead(rank):
            mine = batch[max(0, len(batch) - (rank - 2)) :] if rank > 2 else []
            return [1 if self.chance(0.2) else n for n in mine]

        a = [inner] if rank_a == 1 else [*lead(rank_a), rows, inner]
        b = [inner] if rank_b == 1 else [*lead(rank_b), inner, columns]
        return self.damaged(a), self.damaged(b)

    def matrices(self) -> tuple[list[int], list[int]]:
        rows, columns, inner = (self.rng.choice(self.sizes) for _ in range(3))
        return self.damaged([rows, inner]), self.damaged([inner, columns])

    def damaged(self, shape: list[int], share: float = 1 / 32) -> list[int]:
        if not self.chance(share):
            return shape
        shape = list(shape)
        if self.chance(0.3):
            return self.rng.choice([[], shape[1:], [2, *shape]])
        place = self.rng.randrange(len(shape)) if shape else None
        if place is not None:
            shape[place] = self.rng.choice(self.sizes)
        return shape

    def broadcast(self, shape, wrong: float = 1 / 16) -> list[int]:
        """A shape that broadcasts to `shape`, or rarely not, or is larger than it."""
        shape = list(shape)[self.rng.randrange(len(shape) + 1) :]
        shape = [1 if self.chance(0.3) else n for n in shape]
        if self.chance(wrong):
            return self.rng.choice([[2, *shape], self.damaged(shape, 1), self.damaged(shape, 1)])
        return shape

    def scalar(self, spec: dict, dtype: str) -> dict:
        """Alpha or beta. Where tensors are no numbers yet, or the call is an operator's, of the
        ordinary kinds.
        """
        rng, kind = self.rng, pick(self.rng, SCALARS)
        is_wild = dtype in (*INTEGERS, "bool", *FP8) and kind in ("nan", "inf", "huge")
        if is_wild and self.chance(0.8):
            kind = "int"
        if spec["call"].startswith("op.") and kind == "complex" and dtype not in COMPLEX:
            kind = "float"
        value = {
            "int": rng.choice([1, 2, -1, 3]),
            "zero": 0,
            "bool": rng.choice([False, True]),
            "numpy int64": 2,
            "int tensor": rng.choice([0, 2]),
            "huge": rng.choice([1e39, 2.0**70, 3e38]),
            "string": "2",
        }.get(kind, rng.choice([0.5, -2.0, 1.0, 1.25, 0.0]))
        return {"kind": kind, "value": value}

    # ---- calls
    def call(self, name: str) -> dict:
        rng = self.rng
        spec: dict = {"call": name}
        if self.device != "cpu":
            spec["device"] = self.device
        base = name.removeprefix("op.").removesuffix("_out")
        getattr(self, "of_" + base)(spec)
        t = spec["tensors"]
        setting = pick(rng, SETTINGS)
        if setting:
            spec["setting"] = setting
        if setting == "default_dtype":
            spec["default_dtype"] = rng.choice(["float64", "bfloat16"])
        if not name.startswith("op.") and name not in ("Linear", "patch"):
            if self.chance(0.15):
                spec["names"] = True
            if self.chance(0.06) and "out" not in t and "aux" not in t and base != "scaled_mm":
                spec["batch_invariant"] = False
        transform = pick(rng, TRANSFORMS)
        out = "out" in t or "aux" in t or name.endswith("_out")
        is_usual = setting in ("", "no_grad", "deterministic") and base != "scaled_mm"
        if transform and not out and is_usual:
            self.transform(spec, transform)
        else:
            self.kinds(spec)
            self.gradients(spec)
        self.sober(spec)
        # torch has few products of fp8 on the CPU
        if base != "scaled_mm" and ("transform" in spec or out or "bias" in t):
            for tensor in t.values():
                tensor["dtype"] = "bfloat16" if tensor["dtype"] in FP8 else tensor["dtype"]
        if "transform" not in spec:
            repeat = rng.choices([1, 2, 3], [6, 1, 3])[0]
            if repeat > 1:
                spec["repeat"] = repeat
        return spec

    def sober(self, spec: dict) -> None:
        """Takes back numbers that only show where a product overflows, or how torch reads them
        without a kernel.
        """
        kinds = {t.get("kind") for t in spec["tensors"].values()}
        unread = kinds & {"fake", "meta"} and spec["tensors"]["a"]["dtype"] not in FLOATS + COMPLEX
        for name in ("alpha", "beta"):
            kind = spec.get(name, {}).get("kind")
            differentiated = "gradients" in spec or "transform" in spec
            wild = ["huge", "inf"] if differentiated else []
            wild += ["huge", "nan", "inf", "complex"] if unread else []
            if kind in wild:
                spec[name] = {"kind": "int", "value": 2}

    def of_matmul(self, spec: dict) -> None:
        a, b = self.shapes()
        self.product(spec, a, b, None)

    def of_addmm(self, spec: dict) -> None:
        a, b = self.matrices()
        shape = [a[0] if a else 1, b[-1] if b else 1]
        self.product(spec, a, b, self.broadcast(shape))
        for name in ("alpha", "beta"):
            if self.chance(0.6):
                spec[name] = self.scalar(spec, spec["tensors"]["a"]["dtype"])

    def of_gemm(self, spec: dict) -> None:
        if self.chance(0.5):
            self.of_addmm(spec)
        else:
            self.of_matmul(spec)

    of_gemm_aux = of_gemm

    def product(self, spec: dict, a: list[int], b: list[int], c: list[int] | None) -> None:
        rng, dtype = self.rng, self.dtype()
        plain = spec["call"] in ("op.matmul", "op.matmul_out", "op.addmm", "op.addmm_out")
        with_extra = not plain and dtype not in FP8
        with_extra = with_extra and (self.chance(0.35) or spec["call"].startswith("op.gemm"))
        if with_extra and self.chance(0.5):
            spec["activation"] = rng.choice(ACTIVATIONS) if self.chance(0.97) else "tanh"
            if self.chance(0.01) and not spec["call"].startswith("op."):
                spec["activation"] = 3
        gate = halves(spec.get("activation"))
        if gate == 2 and len(b) > 1 and self.chance(0.9):
            b[-1] *= 2
            if c and c[-1] != 1:
                c[-1] *= 2
        tensors = spec["tensors"] = {"a": self.tensor(a, dtype)}
        other = self.mostly(dtype)
        tensors["b"] = self.tensor(b, other)
        if c is not None:
            tensors["c"] = self.tensor(c, self.mostly(dtype))
        wide = None
        if c is None and spec["call"] != "linear" and self.chance(0.12):
            wide = rng.choice(["float32", "float32", dtype, "float64", "bfloat16"])
            spec["out_dtype"] = wide
        x_shape = product_shape(a, b)
        self.epilogue(spec, x_shape, wide or dtype, with_extra)
        shape = [*x_shape[:-1], x_shape[-1] // gate] if x_shape else []
        is_public = not spec["call"].startswith("op.")
        if spec["call"].endswith("_out") or (is_public and self.chance(0.17)):
            self.out(spec, shape, wide or dtype)

    def epilogue(self, spec: dict, x_shape, dtype: str, with_extra: bool) -> None:
        if not with_extra:
            return
        gate = halves(spec.get("activation"))
        shape = [*x_shape[:-1], x_shape[-1] // gate] if x_shape else []
        tensors = spec["tensors"]
        if "bias" not in tensors and self.chance(0.6):
            bias = x_shape[-1:] if self.chance(0.4) else self.broadcast(x_shape)
            tensors["bias"] = self.tensor(bias, self.mostly(dtype))
        if self.chance(0.4):
            residual = shape if self.chance(0.5) else self.broadcast(shape)
            tensors["residual"] = self.tensor(residual, self.mostly(dtype))
        takes_aux = spec["call"] in ("matmul", "addmm", "op.gemm_out")
        if takes_aux and self.chance(0.25):
            tensors["aux"] = self.written(x_shape, dtype)

    def written(self, shape, dtype: str) -> dict:
        """Memory to write to: right, as a rule."""
        rng = self.rng
        description = self.tensor(shape, dtype)
        description.pop("lazy", None)
        description["fill"] = "nan"
        right = ["contiguous", "contiguous", "transposed", "steps", "offset"]
        description["layout"] = (
            rng.choice(right) if self.chance(0.93) else rng.choice(["expanded", "overlapping"])
        )
        if self.chance(0.03) and dtype in FLOATS + COMPLEX:
            description["lazy"] = "neg" if dtype in FLOATS else "conj"
        return description

    def out(self, spec: dict, shape, dtype: str) -> None:
        rng, tensors = self.rng, spec["tensors"]
        if self.chance(0.1):
            shape = self.damaged(list(shape), 1)
        if self.chance(0.05):
            dtype = self.dtype()
        out = self.written(shape, dtype)
        if self.chance(0.12):
            of = rng.choice([name for name in tensors if name != "aux"])
            out["alias"] = "c" if "c" in tensors and self.chance(0.5) else of
            if self.chance(0.5):
                tensors[out["alias"]]["room"] = out["room"] = 2 * math.prod(shape)
                out["from"] = rng.choice([0, 1, math.prod(tensors[out["alias"]]["shape"])])
        elif self.chance(0.04) and dtype in FLOATS + COMPLEX:
            out["requires_grad"] = True
        elif self.chance(0.05):
            out["kind"] = rng.choice(["inference", "cow", "parameter", "meta", "subclass"])
        tensors["out"] = out

    def of_linear(self, spec: dict) -> None:
        rng, dtype = self.rng, self.dtype()
        inner, columns = rng.choice(self.sizes), rng.choice(self.sizes)
        with_extra = spec["call"] == "linear" and self.chance(0.4)
        if with_extra and self.chance(0.5):
            spec["activation"] = rng.choice(ACTIVATIONS)
            columns *= halves(spec["activation"])
        rank = rng.choices([0, 1, 2, 3], [2, 6, 3, 1])[0]
        lead = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rank)]
        x = self.damaged([*lead, inner])
        w = self.damaged([columns, inner] if self.chance(0.95) else [inner])
        tensors = spec["tensors"] = {"a": self.tensor(x, dtype)}
        tensors["b"] = self.tensor(w, self.mostly(dtype))
        x_shape = [*x[:-1], *w[:-1]]
        if self.chance(0.6):
            bias = w[:-1] if self.chance(0.8) else self.broadcast(x_shape)
            tensors["bias"] = self.tensor(bias, self.mostly(dtype, 0.97))
        self.epilogue(spec, x_shape, dtype, with_extra)
        if spec["call"] == "linear" and self.chance(0.1):
            gate = halves(spec.get("activation"))
            self.out(spec, [*x_shape[:-1], x_shape[-1] // gate] if x_shape else [], dtype)

    def of_Linear(self, spec: dict) -> None:
        """A layer: the weight and the bias are parameters of it."""
        rng, dtype = self.rng, self.dtype(inexact=True)
        inner, columns = rng.choice(self.sizes[1:]), rng.choice(self.sizes[1:])
        if spec["call"] == "Linear" and self.chance(0.4):
            spec["activation"] = rng.choice(ACTIVATIONS)
            columns *= halves(spec["activation"])
        lead = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rng.choices([0, 1, 2], [1, 6, 3])[0])]
        tensors = spec["tensors"] = {
            "a": self.tensor(self.damaged([*lead, inner]), self.mostly(dtype)),
            "b": self.tensor([columns, inner], dtype) | {"kind": "parameter"},
        }
        if self.chance(0.7):
            tensors["bias"] = self.tensor([columns], dtype) | {"kind": "parameter"}
        if self.chance(0.2):
            spec["functional_call"] = True

    of_patch = of_Linear

    def of_scaled_mm(self, spec: dict) -> None:
        rng = self.rng
        rows, columns, inner = (rng.choice([0, 1, 3, 16, 16, 32, 48, 64]) for _ in range(3))
        if self.chance(0.5):
            rows, columns, inner = (16 * rng.choice([1, 2, 3]) for _ in range(3))
        in_blocks = self.chance(0.2)
        if in_blocks:
            rows, columns, inner = (rng.choice([1, 16, 128, 144, 272]) for _ in range(3))
        if self.chance(0.25):
            spec["activation"] = rng.choice(ACTIVATIONS)
            columns *= halves(spec["activation"])
        a, b = self.damaged([rows, inner]), self.damaged([inner, columns])
        tensors = spec["tensors"] = {
            "a": self.tensor(a, rng.choice(FP8)) | {"fill": "normal"},
            "b": self.tensor(b, rng.choice(FP8)) | {"fill": "normal", "layout": "transposed"},
        }
        if self.chance(0.6):
            tensors["a"]["layout"] = "contiguous"
        for name in ("a", "b"):
            if self.chance(0.03):
                tensors[name]["dtype"] = rng.choice(["float32", "bfloat16"])
        per_row = self.chance(0.5)
        scales = ([rows, 1], [1, columns]) if per_row else rng.choice([([], []), ([1], [1, 1])])
        if in_blocks:
            of_rows, of_columns, terms = (-(-n // 128) for n in (rows, columns, inner))
            scale_a = [rng.choice([rows, of_rows]), terms]
            scales = scale_a, [terms, rng.choice([columns, of_columns])]
        for name, shape in zip(("scale_a", "scale_b"), scales, strict=True):
            dtype = "float32" if self.chance(0.97) else rng.choice(["float64", "bfloat16"])
            tensors[name] = self.tensor(self.damaged(shape), dtype) | {"fill": "positive"}
        dtype = rng.choice(["bfloat16", "float16", "float32"])
        if self.chance(0.9):
            others = ["float64", "float8_e4m3fn"]
            spec["out_dtype"] = dtype if self.chance(0.95) else rng.choice(others)
        else:
            dtype = "bfloat16"
        self.epilogue(spec, [rows, columns], dtype, self.chance(0.4))
        if self.chance(0.1 if in_blocks else 0.3):
            spec["use_fast_accum"] = True

    def of_activation_backward(self, spec: dict) -> None:
        dtype = self.rng.choice(FLOATS)
        spec["activation"] = self.rng.choice(ACTIVATIONS)
        gate = halves(spec["activation"])
        shape = [self.rng.choice(self.sizes) for _ in range(self.rng.choice([1, 2, 2, 3]))]
        shape[-1] *= gate
        grad = [*shape[:-1], shape[-1] // gate]
        spec["tensors"] = {
            "grad": self.tensor(self.damaged(grad), dtype),
            "a": self.tensor(shape, dtype),
        }
        for t in spec["tensors"].values():  # at infinity, formulas that are right elsewhere differ
            t["fill"] = "integers" if t.get("fill") == "integers" else "normal"
            if t["layout"] == "overlapping":  # which oneDNN's gelu does not take
                t["layout"] = "expanded"

    # ---- how
    def kinds(self, spec: dict) -> None:
        tensors = spec["tensors"]
        kind = pick(self.rng, KINDS)
        read = [n for n in tensors if n not in ("out", "aux") and "kind" not in tensors[n]]
        is_rare = "out" in tensors and kind in ("meta", "fake", "nested", "sparse", "two")
        if not kind or (is_rare and self.chance(0.8)):
            return
        if kind == "fake" and any("alias" in t for t in tensors.values()):
            return
        if kind in WHOLE and (kind == "fake" or self.chance(0.8)):
            chosen = list(tensors)
        elif kind in ("nested", "sparse"):
            chosen = ["a"] if self.chance(0.8) else ["b"]
        else:
            chosen = [self.rng.choice(read or ["a"])]
        if spec["call"] in ("Linear", "patch"):
            chosen = ["a"]
        if self.impossible(spec, kind):
            return
        for name in chosen:
            t = tensors.get(name)
            if t is None or "alias" in t:
                continue
            if rank := {"nested": 3, "sparse": 2}.get(kind):
                shared = any(x.get("alias") == name for x in tensors.values())
                if len(t["shape"]) != rank or t["dtype"] not in FLOATS or shared:
                    continue  # it has no memory as an out of strides would have
            t["kind"] = kind
            if kind in ("cow", "nested", "sparse", "numpy", "list"):
                t["layout"] = "contiguous"
                t.pop("lazy", None)

    @staticmethod
    def impossible(spec: dict, kind: str) -> bool:
        """Whether a call has no tensors of a kind."""
        tensors = spec["tensors"]
        if spec["call"] in ("Linear", "patch") and kind in WHOLE:
            return True
        if kind in OPAQUE and spec["call"].startswith("op."):
            return True
        if kind in ("two", "nested") and spec.get("setting") == "inference":
            return True  # torch cannot make views of such tensors there
        named = {"out", "bias", "alpha", "beta"} & {*tensors, *spec}
        return kind == "duck" and (bool(named) or spec["call"] == "scaled_mm" or is_fused(spec))

    def gradients(self, spec: dict) -> None:
        tensors = spec["tensors"]
        can = [
            name
            for name, t in tensors.items()
            if name not in ("out", "aux") and t["dtype"] in FLOATS + COMPLEX and "alias" not in t
        ]
        can = [n for n in can if tensors[n].get("kind") not in (*OPAQUE, "meta", "fake")]
        writes = "out" in tensors or "aux" in tensors or spec["call"].endswith("_out")
        if not can or not self.chance(0.05 if writes else 0.45):
            return
        of = [name for name in can if self.chance(0.6)] or [self.rng.choice(can)]
        layouts = ["contiguous", "contiguous", "transposed", "steps", "expanded", "overlapping"]
        layout, activation = self.rng.choice(layouts), str(spec.get("activation"))
        if layout == "overlapping" and ("gelu" in activation or "geglu" in activation):
            layout = "expanded"  # oneDNN's gelu, where it is used, takes no such gradient
        spec["gradients"] = {"of": of, "layout": layout, "seed": self.rng.randrange(2**31)}
        wide = all(tensors[name]["dtype"] in ("float64", "complex128") for name in can)
        if wide and self.chance(0.5):
            spec["gradients"]["double"] = True

    def transform(self, spec: dict, transform: str) -> None:
        tensors = spec["tensors"]
        names = [n for n in tensors if tensors[n]["dtype"] in FLOATS]
        if transform != "vmap" and not names:
            return
        if "grad" in transform or transform == "jvp":
            spec["of"] = [n for n in names if self.chance(0.6)] or names[:1]
        spec["transform"] = transform
        if spec["call"] in ("Linear", "patch"):
            spec["functional_call"] = True
        if "vmap" in transform:
            size = self.rng.choice([1, 2, 3])
            dims = spec["in_dims"] = {}
            for name, t in tensors.items():
                is_last = name == list(tensors)[-1]
                if self.chance(0.6) or (is_last and set(dims.values()) <= {None}):
                    dims[name] = self.rng.randrange(len(t["shape"]) + 1)
                    t["shape"].insert(dims[name], size)
                else:
                    dims[name] = None

    def name_kernel(self, spec: dict) -> None:
        if spec["call"] not in ("matmul", "addmm", "linear") or spec.get("transform"):
            return
        if any("kind" in t for t in spec["tensors"].values()):
            return
        rungs = ["portable"] if self.device == "cpu" else ["portable", "hopper.gemm", "simt.naive"]
        spec["kernel"] = self.rng.choice(rungs)
        for t in spec["tensors"].values():
            if self.chance(0.9) and t["dtype"] in ("float64", *COMPLEX, *INTEGERS):
                t["dtype"] = "float32"
                t.pop("lazy", None)
                t["layout"] = "contiguous" if t["layout"] == "imag" else t["layout"]
        spec.pop("repeat", None)

    def compilable(self, spec: dict) -> bool:
        tensors = spec["tensors"]
        dtypes = {t["dtype"] for t in tensors.values()}
        scalars = {spec[n]["kind"] for n in ("alpha", "beta") if n in spec}
        spec.pop("repeat", None)
        return (
            all("kind" not in t and "alias" not in t for t in tensors.values())
            and scalars <= {"int", "float", "zero"}
            and len(dtypes) == 1
            and dtypes <= {*FLOATS, *FP8}
            and not ("gradients" in spec and "out" in tensors)
            and "b" in tensors
            and len(tensors["b"]["shape"]) > 1
            and spec["call"] not in ("patch", "Linear", "scaled_mm")
            and not {"setting", "transform", "names"} & spec.keys()
        )


def product_shape(a: list[int], b: list[int]) -> list[int]:
    """That of the product of operands that fit together; something for those that do not."""
    lead_a, lead_b = a[:-2], b[:-2]
    rank = max(len(lead_a), len(lead_b))
    pairs = zip(
        [1] * (rank - len(lead_a)) + lead_a, [1] * (rank - len(lead_b)) + lead_b, strict=True
    )
    batch = [y if x == 1 else x for x, y in pairs]
    return [*batch, *(a[-2:-1] if len(a) > 1 else []), *(b[-1:] if len(b) > 1 else [])]
