"""`outblas.grouped_mm` without a GPU: torch group by group, and the portable kernel in Triton's
interpreter, both compared with GEMMs of single groups in float64. `test_plan_keys` says which calls
share a plan, `test_observers` who sees a call that has one.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from support import portable_groups, scaled_groups
from support.grouped_calls import (
    ENDS,
    EXTENT,
    FORMS,
    ROWS_OF_A,
    GroupedCall,
    check_close,
    check_equal,
    draw,
    empty_aux,
    guarded,
    subsets,
)

import outblas
from outblas.base import gpus
from outblas.base.compiling import CompileForbidden
from outblas.call import grouped
from outblas.call.epilogue import ACTIVATIONS, GATED
from outblas.call.errors import OperandError
from outblas.call.grouped import NO_TENSORS, Form
from outblas.kernels import grouped as portable
from outblas.torch_ops import grouped_mm

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

kernels = pytest.mark.parametrize(
    "kernel", [None, pytest.param("portable", marks=pytest.mark.interpreter)]
)
DIVIDED: tuple[Form, ...] = (*FORMS, "masked")
EXACT = "", "relu", "reglu"  # of integers
ROWS = "a_index", "scatter_index", "scatter_weights"
ALL = "bias", "residual", *ROWS
BOTH = "bias", "residual"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def relaid(t: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values, whose dimensions lie in another order, or with gaps."""
    if t.dim() == 1:
        return t.repeat_interleave(2)[::2]
    order = order[-t.dim() :] if t.dim() == 3 else (1, 0)
    return t.permute(order).contiguous().permute([order.index(i) for i in range(t.dim())])


def check(
    call: GroupedCall,
    kernel: str | None,
    *,
    aux: bool = False,
    order: tuple[int, int, int] | None = None,
) -> None:
    """Compares a call, exactly where its activation allows it. `aux`: x is written too. `order`:
    that of the strides of all tensors.
    """
    dtype = call.options.get("out_dtype") or call.tensors["mat_a"].dtype
    written = empty_aux(call, dtype) if aux else None
    if order is not None:
        call = call.replaced(**{name: relaid(t, order) for name, t in call.tensors.items()})
        written = None if written is None else relaid(written, order)
    x, want = call.x(), call.expected()

    result = call.run(aux=written, kernel=kernel)

    assert (result.dtype, result.shape) == (dtype, want.shape)
    assert result.is_contiguous()
    if call.form == "batch" and kernel is None:
        check_close(result, want, 1 / 32)  # torch rounds after each step
    elif call.activation in EXACT:
        check_equal(result, want)
    else:
        check_close(result, want, {F32: 1e-5, F16: 1e-3, BF16: 1 / 128}[dtype])
    if written is not None:
        check_equal(written, x)
        assert written[x.isnan()].isnan().all(), "of no group, so not written"


# ---- values
def extras(form: Form) -> tuple[str, ...]:
    return ("residual",) if form == "ragged_n" else BOTH


GROUPS: tuple[tuple[int, ...], ...] = (
    (21,),
    (1, 2, 3, 4, 5),
    (13, 24),  # all rows
    (0, 0, 0),
    (1, 23, 24),
    (3, 16, 17, 20, 24),  # one more group than a slot
    (-7, 10, 20),
    (-9, -2, 90),  # beyond both ends
    (20, 20, 20),
    (60, 70, 2**31 - 1),
)


def test_every_form_by_torch() -> None:
    """With every epilogue, of groups that end anywhere, of any strides, and of few rows, columns
    and terms. Ends outside of the operand count as its own; counts are limited to the room.
    """
    for form in (*DIVIDED, "batch"):
        for activation in ("", *ACTIVATIONS):
            if form != "ragged_n" or activation not in GATED:
                check(draw(form, *extras(form), activation=activation), None, aux=True)
        for names in subsets(extras(form)):
            check(draw(form, *names, activation="relu"), None, aux="residual" in names)
    for form in DIVIDED:
        for ends in GROUPS:
            check(draw(form, ends=ends, N=37), None)
        for extent, N, K in ((1, 40, 20), (24, 1, 20), (0, 34, 20), (24, 34, 0), (16, 5, 1)):
            names = extras(form)[:-1]
            check(draw(form, *names, extent=extent, M=extent, N=N, K=K), None)
        for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0)):
            names = ALL if form == "ragged_m" else extras(form)
            check(draw(form, *names, activation="relu"), None, aux=True, order=order)
    for names in subsets(("residual", *ROWS)):
        for activation in ("", "silu", "reglu"):
            call = draw("ragged_m", *names, activation=activation)
            check(call, None, aux="scatter_index" in names)


# A form, its tensors beside the operands, an activation, and how it is drawn and checked.
PORTABLE: list[tuple[Form, tuple[str, ...], str, dict[str, Any]]] = [
    ("ragged_m", (), "", {"dtype": BF16, "ends": GROUPS[0]}),
    ("ragged_m", ("bias",), "gelu", {"dtype": F16, "ends": GROUPS[1], "aux": True}),
    ("ragged_m", ("residual",), "swiglu", {"dtype": BF16, "ends": GROUPS[5], "order": (1, 0, 2)}),
    ("ragged_m", BOTH, "geglu_tanh", {"dtype": F32, "ends": GROUPS[6]}),
    ("ragged_m", ("a_index",), "", {"dtype": F32, "index": torch.int32, "N": 37}),
    ("ragged_m", ("scatter_index",), "silu", {"dtype": BF16, "out_dtype": F32, "aux": True}),
    ("ragged_m", ("scatter_index", "scatter_weights"), "", {"dtype": F16, "K": 1}),
    ("ragged_m", ("a_index", "scatter_index", "residual"), "relu", {"index": torch.int32}),
    ("ragged_m", ALL, "reglu", {"dtype": BF16, "out_dtype": F32, "order": (2, 1, 0), "aux": True}),
    ("ragged_m", ALL, "relu", {"dtype": F16, "index": torch.int32, "order": (0, 2, 1)}),
    ("ragged_m", (), "", {"extent": 0}),
    ("ragged_m", (), "", {"K": 0, "ends": GROUPS[9]}),
    ("ragged_n", (), "", {"dtype": BF16, "ends": GROUPS[3], "order": (1, 0, 2)}),
    ("ragged_n", ("residual",), "gelu_tanh", {"dtype": F16, "ends": GROUPS[7], "aux": True}),
    ("ragged_n", ("residual",), "relu", {"out_dtype": F32, "order": (0, 2, 1), "N": 1}),
    ("ragged_k", (), "", {"dtype": BF16, "ends": GROUPS[2], "order": (2, 1, 0)}),
    ("ragged_k", BOTH, "reglu", {"dtype": F16, "ends": GROUPS[3], "aux": True, "M": 16, "N": 6}),
    ("ragged_k", ("bias",), "geglu", {"dtype": F32, "ends": GROUPS[8], "order": (0, 2, 1)}),
    ("ragged_k", ("residual",), "relu", {"out_dtype": F32, "ends": GROUPS[4], "order": (1, 0, 2)}),
    ("masked", (), "", {"dtype": BF16, "order": (1, 0, 2), "aux": True}),
    ("masked", BOTH, "relu", {"dtype": F16, "out_dtype": F32, "ends": GROUPS[6], "aux": True}),
    ("masked", ("bias",), "swiglu", {"dtype": F32, "ends": GROUPS[3], "order": (2, 1, 0)}),
    ("masked", ("residual",), "gelu", {"dtype": BF16, "ends": GROUPS[2], "aux": True, "N": 1}),
    ("batch", BOTH, "swiglu", {"dtype": F32, "M": 5, "ends": GROUPS[2]}),
]


@pytest.mark.interpreter
@pytest.mark.parametrize(("form", "names", "activation", "how"), PORTABLE, ids=str)
def test_every_form_by_the_portable_kernel(
    form: Form, names: tuple[str, ...], activation: str, how: dict[str, Any]
) -> None:
    """NaN that no group reads does not matter."""
    how = {"N": 20, "K": 9, **how}
    aux, order = how.pop("aux", False), how.pop("order", None)
    call = draw(form, *names, activation=activation, **how)
    if (
        order is None
        and form != "batch"
        and "a_index" not in names
        and call.tensors["mat_a"].numel()
    ):
        call = call.poisoned()

    check(call, "portable", aux=aux, order=order)


@kernels
def test_weights_may_have_the_dtype_of_the_result(kernel: str | None) -> None:
    call = draw("ragged_m", *ALL, activation="relu", N=20)

    check(call.replaced(scatter_weights=call.tensors["scatter_weights"].bfloat16()), kernel)


@kernels
def test_a_result_is_rounded_once(kernel: str | None) -> None:
    """257 has no bfloat16, the sum with the bias has one."""
    a, b = torch.ones(1, 257, dtype=BF16), torch.ones(1, 257, 1, dtype=BF16)
    bias, residual = torch.tensor([[-256]], dtype=BF16), torch.tensor([[0.5]], dtype=BF16)
    offs = torch.ones(1, dtype=torch.int32)

    result = outblas.grouped_mm(
        a, b, offs=offs, bias=bias, activation="relu", residual=residual, kernel=kernel
    )

    assert result.item() == 1.5


@kernels
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_an_index_outside_stands_for_the_first_or_last_row_of_a(
    index: torch.dtype, kernel: str | None
) -> None:
    """Also beyond 32 bits. What lies around A is not read."""
    call = draw("ragged_m", "a_index", index=index)
    beyond = 1 if index is torch.int32 else 2**32
    call.tensors["a_index"][:4] = torch.tensor([-1, ROWS_OF_A, beyond + 3, 3 - beyond])
    rows = call.tensors["mat_a"]
    memory = torch.full((3, *rows.shape), torch.nan, dtype=BF16)
    memory[1] = rows

    check(call.replaced(mat_a=memory[1]), kernel)


@kernels
def test_a_scattered_index_beyond_32_bits_does_not_wrap(kernel: str | None) -> None:
    """It would name the row that has been stored before."""
    call = draw("ragged_m", "scatter_index")
    place = call.tensors["scatter_index"]
    place[ENDS[-1] - 2 : ENDS[-1]] = place[:2] + torch.tensor([2**32, -(2**32)])

    check(call, kernel)


@pytest.mark.parametrize("form", DIVIDED)
def test_what_no_group_reads_does_not_matter(form: Form) -> None:
    check(draw(form, "residual").poisoned(), None)


# ---- memory as the portable kernel leaves it
WRONG_ENDS = [None, (10, 5, 20), (2**31 - 1, -(2**31), 3)]


@pytest.mark.interpreter
@pytest.mark.parametrize("ends", WRONG_ENDS, ids=str)
@pytest.mark.parametrize("form", DIVIDED)
def test_nothing_but_the_rows_of_groups_is_written(
    form: Form, ends: tuple[int, ...] | None
) -> None:
    """The result of ends that decrease is undefined, but memory around it is not."""
    call = draw(form, activation="relu" if form == "ragged_n" else "reglu", ends=ends, N=20, K=9)
    written = guarded(call, aux=True)

    written.launch(portable)

    written.check_guards()
    if ends is None:
        check_equal(written.out, call.expected())
        assert torch.equal(written.out.isnan(), call.expected().isnan())
        assert torch.equal(written.aux.isnan(), call.x().isnan())


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("form", "names"), [("ragged_m", ("residual",)), ("ragged_m", ALL), ("ragged_n", ())]
)
def test_what_no_group_covers_gets_zeros_where_it_is_asked_for(
    form: Form, names: tuple[str, ...]
) -> None:
    call = draw(form, *names, index=torch.int32)
    written = guarded(call, aux=True, zero_tail=True)

    written.launch(portable)

    tail: Any = slice(ENDS[-1], None)
    if names == ALL:
        tail = call.tensors["scatter_index"][tail].long()
        tail = tail[(tail >= 0) & (tail < EXTENT)]
    rows = written.out.mT if form == "ragged_n" else written.out
    aux = written.aux.mT if form == "ragged_n" else written.aux
    assert (rows[tail] == 0).all()
    assert aux[ENDS[-1] :].isnan().all()
    check_equal(written.out, call.expected())
    written.check_guards()


# ---- ends that decrease
@kernels
@pytest.mark.parametrize("form", FORMS)
def test_ends_that_decrease_are_refused_on_a_cpu(form: Form, kernel: str | None) -> None:
    """On a GPU groups would share rows, and two CTAs write them."""
    call = draw(form, ends=(10, 20, 24), N=20, K=9)
    message = r"offs\[2\] is 10 but offs\[1\] is 20, expected ends of groups that do not decrease"

    # In the order in which a plan that is kept meets them, too.
    call.run(kernel=kernel)
    with pytest.raises(OperandError, match=message):
        call.run(offs=torch.tensor([10, 20, 10], dtype=torch.int32), kernel=kernel)


def test_ends_that_decrease_are_refused_on_a_gpu_where_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = Mock()
    monkeypatch.setattr(grouped_mm, "_kernels_for", lambda problem, name: kernels)
    call = draw("ragged_m")
    a, b, offs = (call.tensors[name] for name in ("mat_a", "mat_b", "offs"))
    there = replace(guarded(call).problem, device=torch.device("cuda", 0))
    operands = a, b, torch.empty(EXTENT, 34), offs.flip(0), NO_TENSORS

    assert grouped_mm.kernels_for(there, "") is kernels
    monkeypatch.setenv("OUTBLAS_CHECK_OFFS", "1")
    checking = grouped_mm.kernels_for(there, "")
    with pytest.raises(OperandError, match=r"offs\[1\] is 17 but offs\[0\] is 21"):
        checking.run(there, *operands)
    kernels.run.assert_not_called()

    masked = replace(there, capacity=25)  # counts, which may be any
    checking.run(masked, *operands)
    monkeypatch.setattr(grouped_mm, "capturing", lambda device: True)
    checking.run(there, *operands)
    assert [called.args[0] for called in kernels.run.call_args_list] == [masked, there]


# ---- what is compiled
INSTRUCTIONS = [
    ("ragged_m", "swiglu", 75, F16, "fma.rn.f32"),
    ("masked", "", 80, BF16, "mma.sync"),
    ("ragged_k", "swiglu", 90, BF16, "wgmma.mma_async"),
    ("ragged_m", "gelu", 90, F32, "fma.rn.f32"),
]


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(("form", "activation", "arch", "dtype", "instruction"), INSTRUCTIONS)
def test_every_architecture_gets_its_instructions(
    form: Form, activation: str, arch: int, dtype: torch.dtype, instruction: str
) -> None:
    names = () if not activation else ALL if form == "ragged_m" else extras(form)
    how: dict[str, Any] = {"dtype": dtype, "N": 128, "K": 64, "index": torch.int32}
    call = draw(form, *names, activation=activation, **how)
    problem = guarded(call, aux=bool(names), zero_tail=not names and form != "masked").problem

    compiled = portable_groups.compile_for(problem, portable.Block(64, 64, 32, 4, 2), arch)

    assert instruction in compiled.asm["ptx"]


def test_what_a_call_needs_compiles_another_kernel() -> None:
    """A graph must not be captured before the kernel of the very call is loaded."""
    keys = set()
    calls = [draw("ragged_m", *names, N=32) for names in subsets(ALL)]
    for call in (*calls, draw("masked", N=32)):
        beside = {n: t for n, t in call.tensors.items() if n not in ("mat_a", "mat_b", "offs")}
        tensors = grouped.in_kernel_form(grouped.GroupedTensors(**beside), ROWS_OF_A)
        a, b = call.tensors["mat_a"], call.tensors["mat_b"]
        out = torch.empty(*a.shape[:-2], EXTENT, 32, dtype=BF16)
        problem = grouped.describe(call.form, a, b, out, len(ENDS), tensors)
        tile = portable.Block(16, 32, 32, 4, 1)
        traits = portable.traits(problem, tile, "ieee")
        pointers = portable.GroupedPointers(a, b, out, torch.empty(5), *tensors[:6])
        records = pointers, portable.sizes(problem), portable.strides(problem), None
        keys.add(portable._specialization(problem, tile, traits, records))

    assert len(keys) == len(calls) + 1


def test_the_portable_kernel_names_what_it_refuses() -> None:
    problem = guarded(draw("masked")).problem
    many = replace(problem, M=2**31, capacity=2**30, groups=2)
    tail = replace(problem, zero_tail=True)

    assert "at most 2147483520 rows of all groups, but was given 2147483648" in str(
        portable.unsupported(many)
    )
    assert "no rows to zero where groups have places of their own" in str(
        portable.unsupported(tail)
    )


class Forbidden:
    """A kernel that would have to be compiled."""

    def run(self, *_: object) -> None:
        raise CompileForbidden("a_kernel")


def test_torch_computes_what_may_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm, "_no_kernel_reason", lambda mat_a: None)
    monkeypatch.setattr(grouped_mm, "kernels_for", lambda problem, name: Forbidden())
    call = draw("ragged_m")

    with pytest.warns(outblas.FallbackWarning, match="neither a pack nor the cache has a_kernel"):
        result = call.run()
    with pytest.raises(CompileForbidden):
        call.run(kernel="portable")

    check_equal(result, call.expected())


def test_kernels_that_do_not_take_a_call_say_so() -> None:
    call, batch = draw("ragged_m"), draw("batch")

    with pytest.raises(ValueError, match="kernel is 'fast', expected"):
        call.run(kernel="fast")
    with pytest.raises(ValueError, match=r"kernel 'hopper\.grouped': needs an NVIDIA GPU"):
        call.run(kernel="hopper.grouped")
    with pytest.raises(ValueError, match="but was given two batches"):
        batch.run(kernel="hopper.grouped")


# ---- plans: a call like one before is not checked and described again
@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the calls that were checked and described."""
    counter = Mock(wraps=grouped.describe)
    monkeypatch.setattr(grouped, "describe", counter)
    return counter


CALLS: dict[str, Callable[[], GroupedCall]] = {
    "everything": lambda: draw("ragged_m", *ALL, activation="relu", N=20),
    "columns": lambda: draw("ragged_n", N=20),
    "terms": lambda: draw("ragged_k", N=20),
    "counts": lambda: draw("masked", "bias", "residual", activation="relu", N=20),
    "scaled rows": lambda: scaled_groups.draw("ragged_m", N=40, K=40, M=5),
    "scaled counts": lambda: scaled_groups.draw("masked", N=40, K=40, M=5),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_described_once_whatever_its_groups(name: str, described: Mock) -> None:
    call = CALLS[name]()
    groups = "counts" if "counts" in call.tensors else "offs"

    for shift in range(3):
        ends = torch.arange(len(call.tensors[groups]), dtype=torch.int32) * shift
        other = call.replaced(**{groups: ends})
        check_equal(other.run(kernel="portable"), other.expected())

    assert described.call_count == 1


@pytest.mark.interpreter
def test_products_of_gradients_take_plans(described: Mock) -> None:
    """Also after calls that recorded no gradient."""
    call = draw("ragged_m", dtype=F32, N=20)
    call.tensors["mat_b"].requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert not call.run(kernel="portable").requires_grad
    for _ in range(3):
        (call.run(kernel="portable") * 2).sum().backward()

    assert described.call_count == 2  # the product, and the gradient of B


@pytest.mark.interpreter
def test_a_call_that_has_a_plan_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where operands do not fit, and where the kernel may not be compiled any more."""
    call = draw("ragged_m", N=20)
    wrong = call.replaced(mat_b=call.tensors["mat_b"][:2])
    for _ in range(2):
        call.run(kernel="portable")

    for _ in range(2):
        with pytest.raises(OperandError, match=r"mat_b.shape\[0\] is 2 but offs has 5 elements"):
            wrong.run(kernel="portable")
    monkeypatch.setattr(portable, "run", Mock(side_effect=CompileForbidden("not in the cache")))
    with pytest.raises(CompileForbidden, match="not in the cache"):
        call.run(kernel="portable")


def test_a_kernel_is_loaded_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one: a capture there has to be refused."""
    current = [0]

    @contextlib.contextmanager
    def within(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    call = guarded(draw("ragged_m", dtype=torch.float32))
    monkeypatch.setattr(portable, "_loaded", set())
    monkeypatch.setattr(portable.compiling, "check_allowed", lambda name: None)
    monkeypatch.setattr(gpus, "arch_of", lambda device: 90)
    monkeypatch.setitem(portable._KERNELS, "ragged_m", MagicMock())
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 0)

    class On:
        """The portable kernel, on a GPU of this index."""

        def __init__(self, index: int) -> None:
            self.device = torch.device("cuda", index)

        def run(self, problem: Any, *given: Any) -> None:
            portable.run(dataclasses.replace(problem, device=self.device), *given)

    kernels: list[Any] = [On(0), On(1)]
    call.launch(kernels[1])  # whose stream is not captured
    with pytest.raises(RuntimeError, match="CUDA graph"):
        call.launch(kernels[0])
