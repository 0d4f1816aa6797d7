"""Faults in the oracles themselves: what they would no longer see."""

from ..fault import Check, Fault

ORACLES = (Check("test_oracles.py"),)

AGAIN = (Check("test_exact_again.py"),)
FINITE = (Check("test_nonfinite_results.py"),)

_ORACLE = "src/outblas/verify/oracle.py"
_GUARDS = "src/outblas/verify/guards.py"
_CALL = "src/outblas/verify/call.py"

FAULTS = (
    Fault(
        "oracle_compares_nothing",
        _ORACLE,
        "wrong[..., rows, :] = judge(call.out.view[..., rows, :], call.product(rows), rows)",
        "wrong[..., rows, :] = False",
        ORACLES,
        "No oracle calls an element wrong.",
    ),
    Fault(
        "oracle_compares_the_first_rows",
        _ORACLE,
        "        wrong[..., rows, :] = judge(call.out.view[..., rows, :], call.product(rows), "
        "rows)\n",
        "        found = judge(call.out.view[..., rows, :], call.product(rows), rows)\n"
        "        wrong[..., rows, :] = found\n"
        "        wrong[..., rows.start + 128 :, :] = False\n"
        "        break\n",
        ORACLES,
        "Oracles compare the first tile's rows alone.",
    ),
    Fault(
        "oracle_exact_ignores_nan",
        _ORACLE,
        "wrong = _mask(call, lambda got, want, _: got != want.to(got.dtype))",
        "wrong = _mask(call, lambda got, want, _: (got - want.to(got.dtype)).abs() > 0)",
        FINITE,
        "The exact oracle lets NaN pass.",
    ),
    Fault(
        "oracle_exact_with_tolerance",
        _ORACLE,
        "wrong = _mask(call, lambda got, want, _: got != want.to(got.dtype))",
        "wrong = _mask(call, lambda got, want, _: ~((got.double() - want).abs() <= "
        "1e-2 * want.abs()))",
        ORACLES,
        "The exact oracle lets errors of a percent pass.",
    ),
    Fault(
        "oracle_bounded_ignores_nan",
        _ORACLE,
        "return ~(error <= allowed)",
        "return error > allowed",
        FINITE,
        "The bounded oracle lets NaN pass.",
    ),
    Fault(
        "oracle_tolerance_times_100",
        _ORACLE,
        "allowed = _allowance(call, want, rows)",
        "allowed = 100 * _allowance(call, want, rows)",
        ORACLES,
        "The bounded oracle allows a hundred times its bound.",
    ),
    Fault(
        "oracle_frobenius_not_judged",
        _ORACLE,
        "if ours > limit and not bool(wrong.any()):",
        "if ours > 100 * limit and not bool(wrong.any()):",
        ORACLES,
        "Sums that are much worse than torch's pass.",
    ),
    Fault(
        "oracle_nonfinite_forgets_a_sign",
        _ORACLE,
        "            | (got.isneginf() != want.isneginf())\n",
        "",
        FINITE,
        "The nonfinite oracle takes -Inf for any finite number.",
    ),
    Fault(
        "oracle_nonfinite_forgets_nan",
        _ORACLE,
        "            (got.isnan() != want.isnan())\n            | (got.isposinf()",
        "            (got.isposinf()",
        FINITE,
        "The nonfinite oracle does not look for NaN.",
    ),
    Fault(
        "oracle_determinism_runs_once",
        _ORACLE,
        "for repeat in range(1, times):",
        "for repeat in range(1, 1):",
        ORACLES,
        "The determinism oracle runs a call once.",
    ),
    Fault(
        "oracle_result_of_the_last_kernel",
        _ORACLE,
        "        call = self._call\n        call.out.reset()\n",
        "        call = self._call\n",
        AGAIN,
        "A kernel that writes nothing passes by what the kernel before it wrote.",
    ),
    Fault(
        "oracle_guards_not_checked",
        _ORACLE,
        "faults = [*describe(call, wrong), *(faults or []), *call.violations()]",
        "faults = [*describe(call, wrong), *(faults or [])]",
        ORACLES,
        "Stray writes pass.",
    ),
    Fault(
        "oracle_trivial_operands",
        _ORACLE,
        "return lambda t, generator: t.random_(-largest, largest + 1, generator=generator)",
        "return lambda t, generator: t.fill_(1)",
        ORACLES,
        "All operands are ones, which every transposition leaves as they are.",
    ),
    Fault(
        "guards_forget_inputs",
        _CALL,
        "*(guarded.violation(writable=False) for guarded in inputs),",
        "*(guarded.violation(writable=True) for guarded in inputs),",
        ORACLES,
        "A kernel may write to its operands.",
    ),
    Fault(
        "guards_forget_gaps",
        _GUARDS,
        "            self._window(changed).fill_(False)\n        if not bool(changed.any()):\n",
        "            changed[self.start : self.end] = False\n        if not bool(changed.any()):\n",
        ORACLES,
        "Writes between the rows of C pass.",
    ),
    Fault(
        "guards_compare_values",
        _GUARDS,
        "changed = self.storage.view(bits) != self._armed.view(bits)",
        "changed = (self.storage - self._armed).nan_to_num_() != 0",
        ORACLES,
        "A write of one NaN over another passes.",
    ),
    Fault(
        "unwritten_outputs_pass",
        "src/outblas/verify/report.py",
        "    if bool(unwritten.any()):\n",
        "    if False:\n",
        ORACLES,
        "Elements that were never written pass.",
    ),
    Fault(
        "reference_without_beta",
        _CALL,
        "addend = self.c.armed.expand(case.M, case.N)[rows].double() * case.beta",
        "addend = self.c.armed.expand(case.M, case.N)[rows].double()",
        ORACLES,
        "The reference product ignores beta.",
    ),
    Fault(
        "reference_of_the_operands_afterwards",
        _CALL,
        "a, b = (magnitude(t.double()) for t in (self.a.armed[..., rows, :], self.b.armed))",
        "a, b = (magnitude(t.double()) for t in (self.a.view[..., rows, :], self.b.view))",
        ORACLES,
        "A kernel that spoils its operands is held against what it left of them.",
    ),
)
