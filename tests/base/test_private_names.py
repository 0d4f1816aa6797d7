"""What outblas takes from private parts of its dependencies: where it is taken, what the installed
versions lack, and that outblas computes the same without it.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.fp8 import fp8_operands
from support.fresh_torch import run_beside_torch

from outblas.base import compat
from outblas.base.compat import cute_private, torch_private, triton_private

pytestmark = pytest.mark.versions

ROOT = Path(__file__).parents[2]
FOLDERS = ("src/outblas", "autotune", "hopper", "kernels", "turing")
LIBRARIES = ("torch", "triton", "cutlass")
# No underscore, and yet the inside of a library.
INSIDE = ("triton.compiler", "triton.runtime", "triton.backends", "cutlass.base_dsl")


# ---- where private names are taken
def root_of(node: ast.expr) -> str:
    """`torch` of torch.nn.functional; "" of what begins otherwise."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(text: str) -> Iterator[str]:
    """The private names of our dependencies that a module's code names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and root_of(node) in LIBRARIES:
            dotted = [ast.unparse(node)]
        else:
            continue
        for name in dotted:
            first, *others = name.split(".")
            hidden = any(part.startswith("_") and not part.startswith("__") for part in others)
            if first in LIBRARIES and (hidden or name.startswith(INSIDE)):
                yield name


def test_private_names_are_taken_in_core_compat_alone() -> None:
    elsewhere = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent.name != "compat"
        for name in private_uses(path.read_text(encoding="utf-8"))
    ]

    assert elsewhere == []


# ---- what the installed versions lack
def test_the_installed_versions_have_every_private_name() -> None:
    torch_private.inductor_choices()

    lacking = compat.lacking()

    assert lacking == [], "\n".join(
        f"{each.name} is missing ({each.purpose}): {each.without}" for each in lacking
    )


def test_a_name_that_a_library_lacks_is_listed_with_what_happens_without_it() -> None:
    try:
        found = compat.take("torch:_C._no_such_name", "the public one", "a test", "nothing")

        assert found == "the public one"
        assert compat.PrivateName("torch:_C._no_such_name", "a test", "nothing", False) in (
            compat.lacking()
        )
    finally:
        del compat.taken["torch:_C._no_such_name"]


# ---- each fallback beside the name that it replaces
Without = Callable[..., Any]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Without:
    """Imports a module of `compat` anew, under a name of its own, where some names are missing."""

    def imported(module: ModuleType, *names: str) -> Any:
        find = compat.find
        monkeypatch.setattr(
            compat, "find", lambda name: (False, None) if name in names else find(name)
        )
        monkeypatch.setattr(compat, "taken", dict(compat.taken))
        spec = importlib.util.spec_from_file_location(f"{module.__name__}_anew", module.__file__)
        assert spec is not None
        assert spec.loader is not None
        fresh = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
        lacking = {each.name for each in compat.lacking()}
        assert set(names) <= lacking, "the module takes these names"
        return fresh

    return imported


@pytest.mark.parametrize("per", ["operand", "row"])
def test_without_its_name_products_of_fp8_are_torchs_public_ones(
    without: Without, per: str
) -> None:
    fresh = without(torch_private, "torch:_scaled_mm")
    a, b = fp8_operands(16, 32, 64)
    shapes = ((16, 1), (1, 32)) if per == "row" else ((), ())
    scales = [2.0 ** torch.randint(-3, 3, shape) for shape in shapes]  # by which nothing is rounded
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        pytest.skip(f"torch {torch.__version__} has a public scaled_mm for GPUs only")

    found = fresh.scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)

    assert torch.equal(found, torch_private.scaled_mm(a, b, *scales, out_dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("columns", "of_b", "shape"),
    [(2, "BlockWise128x128", (4, 2)), (256, "BlockWise1x128", (256, 4))],
    ids=["blocks of B", "columns of B"],
)
def test_without_its_name_scales_of_blocks_are_named_to_torch(
    without: Without, monkeypatch: pytest.MonkeyPatch, columns: int, of_b: str, shape: Any
) -> None:
    functional = torch.nn.functional
    fresh = without(torch_private, "torch:_scaled_mm")
    given: list[tuple[Any, ...]] = []

    def scaled_mm(*args: Any, **_: Any) -> torch.Tensor:
        given.append(args)
        return torch.ones(16, 256)

    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    a, b = fp8_operands(16, 256, 512)
    out, scales = torch.zeros(16, 256), (torch.rand(16, 4), torch.rand(4, columns))

    found = fresh.scaled_mm(a, b, *scales, out_dtype=torch.float32, out=out)

    assert found is out
    assert bool((out == 1).all())
    kinds = functional.ScalingType
    assert given[0][3::2] == (kinds.BlockWise1x128, getattr(kinds, of_b))
    assert given[0][4].shape == shape


def test_without_its_name_no_gradient_is_added_in_place(without: Without) -> None:
    fresh = without(torch_private, "torch:_C._will_engine_execute_node")
    weight = torch.ones(2, requires_grad=True)
    asked: list[tuple[bool, bool]] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            return 2 * t

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            node = ctx.next_functions[0][0]
            asked.append((fresh.will_accumulate(node), torch_private.will_accumulate(node)))
            return 2 * g

    Doubled.apply(weight).sum().backward()
    torch.autograd.grad(Doubled.apply(weight).sum(), weight)

    assert asked == [(False, True), (False, False)]


def test_without_its_name_a_fake_implementation_is_torchs(without: Without) -> None:
    fresh = without(torch_private, "torch._library.simple_registry:singleton")
    library = torch.library.Library("outblas_test", "FRAGMENT")
    x = torch.ones(2, 3, device="meta")

    for name, names in (("private", torch_private), ("public", fresh)):
        library.define(f"{name}(Tensor x) -> Tensor")
        names.register_fake(f"outblas_test::{name}", lambda x: x.new_empty(x.shape[1]), library)

        assert getattr(torch.ops.outblas_test, name)(x).shape == (3,)


@pytest.mark.parametrize("enabled", [False, True])
def test_without_its_name_deterministic_mode_is_seen(without: Without, enabled: bool) -> None:
    fresh = without(torch_private, "torch:_C._get_deterministic_algorithms")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)

    try:
        assert fresh.fills_memory() is torch_private.fills_memory() is enabled
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_without_its_name_the_precision_of_fp32_is_read(without: Without, precision: str) -> None:
    fresh = without(torch_private, "torch:_C._get_fp32_precision_getter")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision

    try:
        assert fresh.fp32_precision("cuda", "matmul") == precision
        assert torch_private.fp32_precision("cuda", "matmul") == precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("tracing", [False, True])
def test_without_its_name_tracing_is_seen(without: Without, tracing: bool) -> None:
    fresh = without(torch_private, "torch:_C._get_tracing_state")
    seen: list[bool] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        seen.append(fresh.tracing_state() is not None)
        return x + 1

    if tracing:
        torch.jit.trace(program, torch.ones(1), check_trace=False)
    else:
        program(torch.ones(1))

    assert seen == [tracing]


def test_without_inductors_list_offering_a_product_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, find = "torch._inductor.config:external_matmul", compat.find
    monkeypatch.setattr(compat, "taken", dict(compat.taken))
    monkeypatch.setattr(compat, "find", lambda name: (name != hidden, find(name)[1]))

    with pytest.raises(RuntimeError, match="external_matmul is gone"):
        torch_private.inductor_choices()


@pytest.mark.compile
def test_without_tritons_backend_ptx_is_assembled_by_ptxas(without: Without) -> None:
    fresh = without(triton_private, "triton.compiler:make_backend")
    ptx = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry f()\n{\nret;\n}\n"

    cubin, log = fresh.assemble(ptx, {"enable_fp_fusion": True, "ptx_options": None}, 90)

    assert cubin.startswith(b"\x7fELF")
    assert "Compiling entry function 'f'" in log


@pytest.mark.parametrize(
    "name", ["triton.compiler:ASTSource", "triton.backends.compiler:GPUTarget"]
)
def test_without_tritons_compiler_kernels_say_what_is_missing(without: Without, name: str) -> None:
    with pytest.raises(ImportError, match=f"has no {name.replace(':', '.')}"):
        without(triton_private, name)


def test_without_the_dsls_settings_its_compiler_is_told_the_architecture(without: Without) -> None:
    fresh = without(cute_private, "cutlass.base_dsl.dsl:BaseDSL._get_dsl")

    assert cute_private.arch_option("sm_90a") == ""
    assert fresh.arch_option("sm_90a") == " --gpu-arch sm_90a"


# ---- the whole without any of torch's private names
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from support import absent_names
absent_names.hide(["torch*"])
import warnings
warnings.simplefilter("ignore")
import torch
import outblas
from outblas.base import compat

assert compat.lacking() and all(not each.found for each in compat.taken.values())
torch.manual_seed(0)
a, b, c, g = (torch.randn(8, 8) for _ in range(4))
bias = torch.randn(8)
F = torch.nn.functional


class Wrapped(torch.Tensor):
    pass


def gradients(function):
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x, w), x, g, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), w)
    return torch.stack([first.detach(), second])


def under_autocast(function):
    with torch.autocast("cpu"):
        return function(a, b).float()


def under_default_device(function):
    with torch.device("cpu"):
        return function(a, b)


def tangent(function):
    with torch.autograd.forward_ad.dual_level():
        dual = function(torch.autograd.forward_ad.make_dual(a, g), b)
        return torch.autograd.forward_ad.unpack_dual(dual).tangent


def written(function):
    out = torch.empty(8, 8)
    function(a, b, out=out)
    assert out._version >= 1
    return out


def inference(function):
    with torch.inference_mode():
        return function(a, b).clone()


ours, torchs = outblas.matmul, torch.matmul
cases = {
    "matmul": lambda f: f(a, b),
    "gradients": gradients,
    "autocast": under_autocast,
    "default device": under_default_device,
    "forward mode": tangent,
    "out": written,
    "inference": inference,
    "vmap": lambda f: torch.vmap(f)(torch.stack([a, b]), torch.stack([b, a])),
    "subclass": lambda f: f(a.as_subclass(Wrapped), b).as_subclass(torch.Tensor),
}
pairs = {name: (case(ours), case(torchs)) for name, case in cases.items()}
pairs["portable"] = ours(a, b, kernel="portable"), a @ b
pairs["portable gradients"] = (
    gradients(lambda x, w: ours(x, w, kernel="portable")), gradients(torchs)
)
pairs["addmm"] = outblas.addmm(c, a, b, beta=0.5), torch.addmm(c, a, b, beta=0.5)
pairs["linear"] = outblas.linear(a, b, bias, activation="gelu"), F.gelu(F.linear(a, b, bias))
for name, (found, expected) in pairs.items():
    torch.testing.assert_close(found, expected, msg=lambda text: f"{name}: {text}")
    print(name)
"""


@pytest.mark.interpreter
def test_without_any_private_name_of_torch_products_are_torchs() -> None:
    done = run_beside_torch(PROGRAM, str(ROOT / "tests"))

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "linear"
