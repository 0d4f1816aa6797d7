"""The products of a pack: from a file, from the layers of a model, or from a model's configuration
as Hugging Face has it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.base import ownership
from outblas.base.shapes import HEADS, LAYERS
from outblas.call.fp8 import BLOCK
from outblas.call.grouped import GATHERING_COLUMNS
from outblas.call.product_groups import Groups
from outblas.call.products import DTYPES, Products, parse_line, parse_rows
from outblas.call.scaling import Scaling
from outblas.call.steps import GATED, Steps

Rows = tuple[tuple[int, int], ...]
Size = tuple[int, int]  # N and K

# What a linear layer of an fp8 checkpoint is, by `quantization_config.quant_method`, where its
# weights have no scales of blocks.
_WHOLE_SCALES = {"fp8": "tensorwise", "fbgemm_fp8": "rowwise"}
# The gated unit of each function that configurations name.
_GATED = {function: gated for gated, function in GATED.items()} | {
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
LARGEST = 16 << 20  # bytes of a list of products, and of a configuration


def parse_file(path: Path) -> list[Products]:
    """Reads products, one to a line; `#` begins a comment. Raises ValueError, which names the line,
    and OSError.
    """
    found = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        if text := line.partition("#")[0].strip():
            try:
                found.append(parse_line(text))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no products, expected lines such as 1-512x4096x4096")
    return found


def of_model(name: str, rows: str, tensor_parallel: int = 1) -> list[Products]:
    """Returns the products of a model's layers and of its head. `name`: that of a model of
    `LAYERS`, or the path of a `config.json` as Hugging Face has it, or of its folder.
    `tensor_parallel` processes share each layer.

    Raises ValueError, and OSError for a file that cannot be read.
    """
    ranges = parse_rows(rows, "--rows")
    if name.lower() in LAYERS:
        if tensor_parallel != 1:
            raise ValueError(
                f"--tensor-parallel is {tensor_parallel} with {name}, expected 1, or the path of a "
                "config.json, which says what is divided"
            )
        sizes = dict.fromkeys((*LAYERS[name.lower()], HEADS[name.lower()]))
        return [Products(ranges, N, K) for N, K in sizes]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        known = ", ".join(LAYERS)
        raise ValueError(f"--model is {name!r}, expected {known} or the path of a config.json")
    text = _text_of(path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not the JSON of a model's configuration: {error}") from None
    if type(config) is not dict:
        kind = type(config).__name__
        raise ValueError(f"{path} has a JSON {kind}, expected the object of a configuration")
    return products_of(config, ranges, tensor_parallel, str(path))


def _text_of(path: Path) -> str:
    """Returns what a file of at most `LARGEST` bytes has. Raises ValueError and OSError."""
    try:
        return ownership.read_regular(path, LARGEST).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


# ---- the configuration of a decoder
@dataclass(frozen=True)
class _Sizes:
    """The sizes of a configuration, of which `parallel` processes have a share each. `where`: what
    messages call it.
    """

    config: Mapping[str, Any]
    parallel: int
    where: str

    def size(self, *names: str) -> int:
        """Returns the first of some sizes that is given. Raises ValueError."""
        if found := self.optional(*names):
            return found
        raise ValueError(f"{self.where} lacks {names[0]}, expected the configuration of a decoder")

    def optional(self, *names: str) -> int:
        """Returns the first of some sizes that is given, or 0."""
        given = (self.config.get(name) for name in names)
        return next((size for size in given if type(size) is int and size > 0), 0)

    def share(self, value: int, name: str) -> int:
        """Returns what one process has of a size. Raises ValueError."""
        if value % self.parallel:
            raise ValueError(
                f"{name} is {value} in {self.where}, expected a multiple of --tensor-parallel "
                f"{self.parallel}"
            )
        return value // self.parallel


def products_of(config: Mapping[str, Any], rows: Rows, parallel: int, where: str) -> list[Products]:
    """Returns the products of a decoder's linear layers, of its experts and of its head. Those of
    an fp8 checkpoint are scaled as it says, without the head and the choice of experts. Raises
    ValueError for a configuration that lacks a size, or whose sizes are no multiples of `parallel`.
    """
    *layers, head = of_config(config, parallel, where)
    sizes = _Sizes(config, parallel, where)
    given = config.get("torch_dtype") or config.get("dtype")
    dtype = given if given in DTYPES else DTYPES[0]
    recipes = _recipes(config, where)
    scaling = None if recipes is None else Scaling(*recipes, result=dtype)
    name = dtype if scaling is None else "fp8-e4m3"
    found = [Products(rows, N, K, name, scaling=scaling) for N, K in layers]
    if scaling is not None and scaling.in_blocks:
        found += _fused_mlp(sizes, rows, scaling)
    if experts := _experts(config):
        found += _products_of_experts(sizes, experts, rows, name, scaling)
        found.append(Products(rows, experts, sizes.size("hidden_size"), dtype))
    return list(dict.fromkeys((*found, Products(rows, *head, dtype))))


def _experts(config: Mapping[str, Any]) -> int:
    """Returns how many experts share the rows of a layer; 0 without any."""
    return _Sizes(config, 1, "").optional("num_local_experts", "num_experts", "n_routed_experts")


def _products_of_experts(
    sizes: _Sizes, experts: int, rows: Rows, dtype: str, scaling: Scaling | None
) -> list[Products]:
    """Returns the products of experts, as `outblas.moe_mlp` computes them: every token is a row of
    some of them. Processes share the columns of each expert. Without scales of blocks none are
    scaled.
    """
    if scaling is not None and not scaling.in_blocks:
        dtype, scaling = scaling.result, None
    chosen = sizes.size("num_experts_per_tok")
    of_experts = tuple((chosen * first, chosen * last) for first, last in rows)
    name = "moe_intermediate_size"
    inner = sizes.share(sizes.optional(name) or sizes.size("intermediate_size"), name)
    hidden, gated = sizes.size("hidden_size"), _GATED.get(str(sizes.config.get("hidden_act")), "")
    gathers = scaling is None and 2 * inner <= GATHERING_COLUMNS
    top = chosen if scaling is None else 0  # `moe_mlp` takes no fp8
    first, second = Groups(experts, gathers=gathers, top=top), Groups(experts)
    steps = Steps(activation=gated)
    return [
        Products(of_experts, 2 * inner, hidden, dtype, steps=steps, scaling=scaling, groups=first),
        Products(of_experts, hidden, inner, dtype, scaling=scaling, groups=second),
    ]


def _recipes(config: Mapping[str, Any], where: str) -> tuple[str, str] | None:
    """Returns the recipes of inputs and weights of an fp8 checkpoint; None for another one. Raises
    ValueError for blocks that no kernel takes.
    """
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config is {quantization!r} in {where}, expected an object")
    method = str(quantization.get("quant_method"))
    if method not in _WHOLE_SCALES:
        return None
    block = quantization.get("weight_block_size")
    if block is None:
        return _WHOLE_SCALES[method], _WHOLE_SCALES[method]
    if block != [BLOCK, BLOCK]:
        raise ValueError(f"weight_block_size is {block} in {where}, expected {[BLOCK, BLOCK]}")
    return "1x128", "128x128"


def _fused_mlp(sizes: _Sizes, rows: Rows, scaling: Scaling) -> list[Products]:
    """Returns the product of gate and up with a result in fp8, as `outblas.patch` with `fuse=True`
    computes it.
    """
    gated = _GATED.get(str(sizes.config.get("hidden_act")))
    if gated is None:
        return []
    steps, to_fp8 = Steps(activation=gated), Scaling(scaling.a, scaling.b, result="e4m3")
    hidden = sizes.size("hidden_size", "n_embd")
    return [
        Products(rows, 2 * inner, hidden, "fp8-e4m3", steps=steps, scaling=to_fp8)
        for inner in _inner_sizes(sizes)
        if inner % BLOCK == 0
    ]


def of_config(config: Mapping[str, Any], parallel: int, where: str) -> Sequence[Size]:
    """Returns N and K of the linear layers of a decoder, alone and joined as servers join them:
    queries with keys and values, gate with up; and of its head, which is the last. Raises
    ValueError as `products_of`.
    """
    sizes = _Sizes(config, parallel, where)
    hidden = sizes.size("hidden_size", "n_embd")
    attention = _latent_attention if sizes.optional("kv_lora_rank") else _attention
    vocabulary = sizes.share(sizes.size("vocab_size"), "vocab_size")
    mlps = [
        pair
        for inner in _inner_sizes(sizes)
        for pair in ((2 * inner, hidden), (inner, hidden), (hidden, inner))
    ]
    return (*attention(sizes, hidden), *mlps, (vocabulary, hidden))


def _attention(sizes: _Sizes, hidden: int) -> tuple[Size, ...]:
    heads = sizes.size("num_attention_heads", "n_head")
    head = sizes.optional("head_dim") or hidden // heads
    key_heads = sizes.optional("num_key_value_heads") or heads
    queries = sizes.share(heads, "num_attention_heads") * head
    # Where there are fewer key heads than processes, each keeps a copy of one.
    keys = max(1, key_heads // sizes.parallel) * head
    return (queries + 2 * keys, hidden), (queries, hidden), (keys, hidden), (hidden, queries)


def _latent_attention(sizes: _Sizes, hidden: int) -> tuple[Size, ...]:
    """Returns the layers of attention whose keys and values are projected from a few columns, as in
    DeepSeek-V3. The projections to these columns are not divided.
    """
    heads = sizes.share(sizes.size("num_attention_heads"), "num_attention_heads")
    keys, turned = sizes.size("qk_nope_head_dim"), sizes.size("qk_rope_head_dim")
    values, latent = sizes.size("v_head_dim"), sizes.size("kv_lora_rank")
    of_queries = heads * (keys + turned)
    common = (latent + turned, hidden), (heads * (keys + values), latent), (hidden, heads * values)
    if low := sizes.optional("q_lora_rank"):
        return (low + latent + turned, hidden), (low, hidden), (of_queries, low), *common
    return (of_queries, hidden), *common


def _inner_sizes(sizes: _Sizes) -> tuple[int, ...]:
    """Returns the columns between gate or up and down, of layers without experts and of experts
    that all rows share.
    """
    config, found = sizes.config, []
    if not _experts(config) or _has_dense_layers(config):
        found.append(("intermediate_size", sizes.size("intermediate_size", "n_inner")))
    if _experts(config):
        shared = sizes.optional("n_shared_experts") * sizes.optional("moe_intermediate_size")
        found.append(("n_shared_experts", shared))
        name = "shared_expert_intermediate_size"
        found.append((name, sizes.optional(name)))
    return tuple(sizes.share(inner, name) for name, inner in found if inner)


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """Returns whether some layers of a decoder with experts have none."""
    return bool(
        config.get("first_k_dense_replace")
        or config.get("mlp_only_layers")
        or config.get("decoder_sparse_step", 1) != 1
    )
