"""Providers and records of the bench, and its command without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import invoke, refuses

from outblas.bench import campaign, providers, record
from outblas.bench.operation import Extras, Operation
from outblas.bench.record import Device
from outblas.bench.statistics import ratio
from outblas.call.steps import Steps
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused


# ---- figures
@pytest.mark.parametrize("flops_a_cycle", [None, 4096 * 132])
def test_figures_are_those_of_the_median_call(flops_a_cycle: int | None) -> None:
    """Utilisation is of what the device can do at its clock, where that is known."""
    spread, device = ratio([200.0, 200.0], [100.0, 100.0]), Device(flops_a_cycle)

    of_call = record.figures((1024, 2048, 512), [100.0] * 2, [1500.0] * 2, spread, device, 1)

    flops = 2 * 1024 * 2048 * 512 / 100e-6
    assert of_call["tflops"] == pytest.approx(flops / 1e12)
    assert (of_call["ratio"], of_call["us"], of_call["clock_mhz"]) == (2.0, 100.0, 1500.0)
    if flops_a_cycle is None:
        assert of_call["utilisation"] is None
    else:
        assert of_call["utilisation"] == pytest.approx(flops / (flops_a_cycle * 1500e6))


@pytest.mark.parametrize(("watts", "pj"), [([700.0, 700.0], 0.14e12), ([700.0, None], None)])
def test_energy_is_that_of_a_call_where_every_turn_has_watts(watts: Any, pj: float | None) -> None:
    energy = record.energy((4096, 4096, 4096), [200.0, 200.0], watts)["pj_per_flop"]

    assert energy == (None if pj is None else pytest.approx(pj / (2 * 4096**3)))


# ---- providers


def test_a_provider_that_is_listed_twice_has_two_labels() -> None:
    cublas, kernel = providers.parse("cublas"), providers.parse("hopper.tma_wgmma")

    found = campaign.distinct([cublas, cublas, cublas, kernel, kernel])

    assert [provider.label for provider in found] == [
        "cublas",
        "cublas (2)",
        "cublas (3)",
        "hopper.tma_wgmma",
        "hopper.tma_wgmma (2)",
    ]


@pytest.mark.parametrize(
    ("operation", "promised"),
    [(Operation(), {}), (Operation(batch_invariant=True), {"batch_invariant": True})],
    ids=["plain", "batch_invariant"],
)
def test_outblas_is_timed_as_it_is_called(
    operation: Operation, promised: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel is named: what was tuned runs, or what the rule says."""
    keywords: list[dict[str, Any]] = []
    monkeypatch.setattr("outblas.api.matmul", lambda a, b, **how: keywords.append(how))
    out = torch.empty(2, 2)

    providers.parse("outblas", operation).prepare(torch.eye(2), torch.eye(2), out, Extras())()

    assert keywords == [{"out": out, **promised}]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("bfloat16", "takes fp8 operands, not bfloat16"), ("fp8-block", "takes no fp8-block")],
)
def test_fast_sums_are_of_fp8_without_blocks(dtype: str, message: str) -> None:
    with pytest.raises(Refused, match=f"cublas-fast-accum {message}"):
        providers.parse("cublas-fast-accum", Operation(dtype)).prepare(
            *[torch.eye(2)] * 3, Extras()
        )


def test_torch_is_given_the_scales_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "outblas.bench.operation.cublas_scaled_mm", lambda *args, **_: given.append(args)
    )
    operation = Operation("fp8-block")

    providers.parse("cublas", operation).prepare(
        *operation.operands((48, 256, 1024), "nt", "cpu")
    )()

    ((_, _, scale_a, scale_b, bias),) = given
    assert (scale_a.shape, scale_b.shape, bias) == ((48, 8), (8, 2), None)


def test_an_epilogue_is_checked_in_the_layout_that_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts: list[str] = []
    monkeypatch.setattr(Operation, "fault", lambda *_, layout: layouts.append(layout))
    provider = providers.parse("outblas", Operation(steps=Steps(bias=True)))

    assert provider.fault(Case(48, 256, 1024, torch.bfloat16, layout="tn")) is None
    assert layouts == ["tn"]


def test_the_best_of_cublaslt_is_checked_before_torch_adds_to_it() -> None:
    """What torch adds rounds in between: that is its way, and no fault."""
    fused = providers.parse("cublaslt-best", Operation(steps=Steps(bias=True)))

    assert fused.is_checked_exactly
    assert not providers.parse("outblas", Operation(steps=Steps(bias=True))).is_checked_exactly


@pytest.mark.parametrize("name", ["cublas", "outblas"])
def test_a_call_takes_other_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outblas.api.matmul", lambda a, b, out: torch.mm(a, b, out=out))
    a, weights, out = torch.eye(2), torch.randn(2, 2), torch.empty(2, 2)
    call = providers.parse(name).prepare(a, torch.eye(2), out, Extras())

    call(weights)

    assert torch.equal(out, weights)


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch.compile makes, which then run eagerly."""
    graphs: list[Any] = []
    compile_by = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compile_recorded(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return compile_by(function, backend=backend, dynamic=False)

    monkeypatch.setattr(torch, "compile", compile_recorded)
    return graphs


def test_torch_compile_compiles_every_shape(
    compiled_graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo runs a function eagerly after some recompilations: the suite has eleven shapes."""
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 1)
    sizes = range(2, 5)

    for n in sizes:
        a, b, out = torch.eye(n), torch.full((n, n), float(n)), torch.empty(n, n)
        providers.parse("torch.compile").prepare(a, b, out, Extras())()
        assert out.eq(n).all(), f"size {n}"

    assert len(compiled_graphs) == len(sizes)


def test_torch_compile_fuses_an_epilogue(compiled_graphs: list[Any]) -> None:
    operation = Operation("float32", Steps.parse("bias+gelu+residual"))
    provider = providers.parse("torch.compile", operation)

    assert operation.fault(provider.prepare, (8, 16, 32), "cpu") is None
    assert len(compiled_graphs) == 1


# ---- the command
BAD_ARGUMENTS = [
    (("--kernels", "hopper.nothing"), "--kernels is 'hopper.nothing', expected one of"),
    (("--kernels", "portable[block_m=7"), "expected NAME or NAME"),
    (("--kernels", "cublas[a=1]"), "takes no config"),
    (("--kernels", "portable[nothing=1]"), "config has 'nothing=1'"),
    (("--kernels", "portable[block_m=x]"), "expected an integer"),
    (("--ladder", "nothing"), "expected a ladder"),
    (("--shapes", "12x"), "--shapes is '12x'"),
    (("--shapes", "0"), "expected sizes of at least 1"),
    (("--dtype", "int8"), "--dtype is 'int8'"),
    (("--layout", "xx"), "--layout is 'xx'"),
    (("--layout", ","), "--layout is ','"),
    (("--mode", "fast"), "--mode is 'fast'"),
    (("--rounds", "1"), "--rounds"),
    (("--save", "/nowhere/file.json"), "--save is '/nowhere/file.json'"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD_ARGUMENTS, ids=[" ".join(given) for given, _ in BAD_ARGUMENTS]
)
def test_bad_arguments_are_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    refuses(message, "bench", *arguments)


@pytest.mark.no_gpu
def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign.Campaign, "run", lambda *_: pytest.fail("timed"))
    saved = tmp_path / "bench.json"

    result = invoke("bench", "--save", saved, "--json", code=3)

    assert "no NVIDIA GPU" in result.stderr
    assert result.stdout == ""
    assert not saved.exists()
