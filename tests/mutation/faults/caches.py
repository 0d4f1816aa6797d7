"""Faults in keys: of compiled kernels, of plans, of what was tuned."""

from ..fault import Check, Fault

TRUST = (Check("test_cache_trust.py"), Check("test_cache.py"))
CHOICE = (Check("test_lookup.py"),)
KEY = (Check("test_compile_key.py"),)
PLANS = (Check("test_plan_keys.py"),)

_CACHE = "src/outblas/core/cache.py"
_EAGER = "src/outblas/torch_ops/eager.py"
_LINEAR = "src/outblas/torch_ops/linear.py"
_DISPATCH = "src/outblas/runtime/dispatch.py"
_LOOKUP = "autotune/lookup.py"

FAULTS = (
    Fault(
        "object_of_another_kernel_loaded",
        _CACHE,
        "if named != path.stem or (facts is not None and record != json.loads(_text(facts))):",
        "if named != path.stem:",
        TRUST,
        "A file is loaded whose record is that of another kernel.",
    ),
    Fault(
        "object_checksum_ignored",
        _CACHE,
        "if checksum != hashlib.sha256(code).hexdigest():",
        "if not checksum:",
        TRUST,
        "A damaged object is loaded.",
    ),
    Fault(
        "compile_key_without_source",
        "hopper/core/compile.py",
        '        "source": source_fingerprint(),\n',
        '        "source": "",\n',
        (Check("test_compile.py", compiles=True), Check("test_launcher.py", compiles=True)),
        "Kernels that were compiled from other sources are loaded from disk.",
    ),
    Fault(
        "compile_key_without_dtype",
        "hopper/core/compile.py",
        "cache.digest(dataclasses.asdict(variant))",
        "cache.digest(dataclasses.asdict(variant.config))",
        (Check("test_names.py"), Check("test_variant.py")),
        "Variants that differ in dtypes, layout or traits beyond the readable part share a name.",
    ),
    Fault(
        "compile_key_with_one_order_of_k",
        "hopper/core/config.py",
        "        split_k=split_k,\n    )\n",
        "        split_k=split_k,\n        k_serpentine=plain.k_serpentine,\n    )\n",
        KEY,
        "Kernels that walk K in one order and in turns share a compile.",
    ),
    Fault(
        "compile_key_without_options",
        "hopper/core/compile.py",
        '        "options": OPTIONS,\n',
        "",
        KEY,
        "Kernels that were compiled with other options are loaded from disk.",
    ),
    Fault(
        "compile_key_without_dsl",
        "hopper/core/compile.py",
        '        "dsl": metadata.version("nvidia-cutlass-dsl"),\n',
        "",
        KEY,
        "Kernels that another version of the DSL compiled are loaded from disk.",
    ),
    Fault(
        "fingerprint_of_the_top_folder",
        "autotune/search/target.py",
        'for file in sorted(root.rglob("*.py"))',
        'for file in sorted(root.glob("*.py"))',
        (Check("test_target.py"),),
        "Trials of a kernel count though a file in a folder of its ladder has changed.",
    ),
    Fault(
        "eager_key_without_alignment",
        _EAGER,
        "key: tuple[Any, ...] = (a.shape, b.shape, in_line_a, in_line_b, batch_invariant)",
        "key: tuple[Any, ...] = (a.shape, b.shape, batch_invariant)",
        PLANS,
        "A warm call takes the plan of operands that lie better.",
    ),
    Fault(
        "eager_key_without_beta",
        _EAGER,
        "key = (key, _address(c) & 15, alpha == 1, alpha == 0, beta == 0)",
        "key = (key, _address(c) & 15, alpha == 1, alpha == 0)",
        PLANS,
        "A warm call with beta takes the plan of one that ignores C.",
    ),
    Fault(
        "eager_key_without_activation",
        _EAGER,
        "            key = (key, extra[0])\n",
        "            key = (key, None)\n",
        PLANS,
        "A warm call takes the plan of another activation.",
    ),
    Fault(
        "eager_key_without_gradients",
        _EAGER,
        "            if (requires_grad is None or requires_grad is _gradients_enabled()) and (\n",
        "            if (\n",
        (Check("test_eager_observers.py"), Check("torch_ops")),
        "A warm call under no_grad takes the plan of one that records gradients.",
    ),
    Fault(
        "layer_key_without_gradients",
        _LINEAR,
        "            if (requires_grad is None or requires_grad is _gradients_enabled()) and (\n",
        "            if (\n",
        (Check("test_linear_autograd.py"),),
        "A warm layer under no_grad takes the plan of one that records gradients.",
    ),
    Fault(
        "layer_key_without_activation",
        _LINEAR,
        "            activation,\n            bias_at,\n",
        "            bias_at,\n",
        PLANS,
        "A warm layer takes the plan of another activation.",
    ),
    Fault(
        "layer_key_without_a_residual_s_address",
        _LINEAR,
        "            residual_at,\n            out_at,\n",
        "            out_at,\n",
        PLANS,
        "A warm layer takes the plan of a residual that lies better.",
    ),
    Fault(
        "newest_plan_is_forgotten",
        _DISPATCH,
        "            del cache[next(iter(cache))]\n",
        "            cache.popitem()\n",
        (Check("test_eager.py"),),
        "Where there are too many plans, the newest makes room.",
    ),
    Fault(
        "planned_without_a_look_at_what_is_written",
        _EAGER,
        "            check_writable(t, name)\n",
        "            pass\n",
        (Check("test_eager.py"),),
        "A call writes to an inference tensor by the plan of another tensor.",
    ),
    Fault(
        "plan_key_without_beta",
        _DISPATCH,
        "call.alpha == 1, call.alpha == 0, call.beta == 0),",
        "call.alpha == 1, call.alpha == 0),",
        PLANS,
        "A call with beta takes the plan of one that ignores C.",
    ),
    Fault(
        "plan_key_without_alpha",
        _DISPATCH,
        "read_address(c) & 15, call.alpha == 1, call.alpha == 0, call.beta == 0),",
        "read_address(c) & 15, call.beta == 0),",
        PLANS,
        "A call with alpha takes the plan of one without.",
    ),
    Fault(
        "plan_key_without_out_dtype",
        _DISPATCH,
        "        call.out_dtype,\n        call.kernel,\n",
        "        call.kernel,\n",
        PLANS,
        "A call takes the plan of one that asks for another dtype.",
    ),
    Fault(
        "plan_key_without_kernel",
        _DISPATCH,
        "        call.out_dtype,\n        call.kernel,\n        call.config,\n",
        "        call.out_dtype,\n        call.config,\n",
        (Check("test_plan_keys.py"),),
        "A call that names a kernel takes the plan of one that names none.",
    ),
    Fault(
        "plan_key_without_batch_invariance",
        _DISPATCH,
        "        call.batch_invariant,\n        a.dtype is",
        "        a.dtype is",
        PLANS,
        "A batch-invariant call takes the plan of one that is not.",
    ),
    Fault(
        "plan_key_without_strides",
        _DISPATCH,
        "return t.shape, t.stride(), t.dtype, t.device",
        "return t.shape, t.dtype, t.device",
        PLANS,
        "A call takes the plan of operands with other strides.",
    ),
    Fault(
        "table_of_another_gpu",
        _LOOKUP,
        "own = [table for table in tables if table.gpu.model == gpu.model]",
        "own = list(tables)",
        CHOICE,
        "The shipped table of another GPU counts as this one's.",
    ),
    Fault(
        "cousin_of_another_architecture",
        _LOOKUP,
        "table for table in tables if table.gpu.arch == gpu.arch and table.gpu.model != gpu.model",
        "table for table in tables if table.gpu.model != gpu.model",
        CHOICE,
        "A table of another architecture speaks for this GPU.",
    ),
    Fault(
        "store_of_another_version",
        _LOOKUP,
        "                HERE if each.gpu == gpu else MODEL,\n",
        "                HERE,\n",
        CHOICE,
        "What was tuned under other software counts as tuned here.",
    ),
    Fault(
        "choice_of_another_workload",
        _LOOKUP,
        "        found = self._choices.get(workload)\n        if found is None:\n"
        "            found = self._choices[workload] = tuple(self._ranked(workload))\n",
        "        key: Any = workload.shape\n        found = self._choices.get(key)\n"
        "        if found is None:\n"
        "            found = self._choices[key] = tuple(self._ranked(workload))\n",
        (Check("test_tuning_index.py"),),
        "The choice for a shape is remembered for all its dtypes and layouts.",
    ),
    Fault(
        "neighbour_of_another_layout",
        _LOOKUP,
        "        entry.kernel == PRODUCTION\n        and _width(entry.workload)",
        "        _width(entry.workload)",
        CHOICE,
        "A winner of another layout speaks for any kernel.",
    ),
)
