"""Faults in what the host of `hopper.gemm` hands to a launch: workspaces, copies, strides."""

from ..fault import Check, Fault

SUMS = (Check("test_workspace.py"),)
GEMM = (Check("test_gemm.py"), Check("hopper/gemm"))
EPILOGUE = (Check("test_gemm_epilogue.py"),)
ACCESS = (Check("test_epilogue_access.py"),)
OPERANDS = (Check("test_launch_operands.py"),)
READY = (Check("test_weights_ready.py"), Check("test_launcher.py"))
CARVEOUT = (Check("test_sm_carveout.py"),)

_WORKSPACE = "hopper/gemm/workspace.py"
_COPIES = "hopper/gemm/operand_copies.py"
_CANONICAL = "hopper/gemm/canonical.py"
_LAUNCHER = "hopper/gemm/launcher.py"
_PLAN = "hopper/gemm/host.py"
_LINEAR = "src/outblas/torch_ops/linear.py"

FAULTS = (
    Fault(
        "weights_ready_that_are_copied",
        _PLAN,
        "    if canonical.copies[1]:  #",
        "    if canonical.copies[0]:  #",
        READY,
        "A kernel loads a copy of B before the copy is made.",
    ),
    Fault(
        "linear_has_one_plan_for_every_carveout",
        _LINEAR,
        "            (_limit.ever and _limit.count()) or _sm_carveout(),\n",
        "",
        CARVEOUT,
        "A layer runs the plan of a call that left other SMs free.",
    ),
    Fault(
        "products_have_one_plan_for_every_carveout",
        "src/outblas/torch_ops/eager.py",
        "        left = (_limit.ever and _limit.count()) or _sm_carveout()\n",
        "        left = 0\n",
        CARVEOUT,
        "A product runs the plan of a call that left other SMs free.",
    ),
    Fault(
        "plans_forget_the_carveout",
        "src/outblas/runtime/dispatch.py",
        "        sm_carveout.reserved(),\n    )\n",
        "    )\n",
        CARVEOUT,
        "Calls that operators plan have one plan for every carveout.",
    ),
    Fault(
        "portable_takes_a_carveout",
        "src/outblas/runtime/launcher.py",
        "if problem.sm_carveout and not on_cpu and kernel != KEEPS_CARVEOUT:",
        "if False:",
        CARVEOUT,
        "A kernel that uses all SMs runs where some are to be left free.",
    ),
    Fault(
        "hopper_gemm_uses_all_sms",
        _PLAN,
        "        config = tile_order.within(problem.device, config, problem.sm_carveout)\n",
        "        pass\n",
        (Check("test_carveout.py", "left"),),
        "hopper.gemm launches as many CTAs as there are SMs.",
    ),
    Fault(
        "weights_ready_without_the_promise",
        _LINEAR,
        "            weights_ready,\n            (_limit",
        "            (_limit",
        READY,
        "A layer runs the plan of a call within the context, which loads weights early.",
    ),
    Fault(
        "weights_ready_while_they_are_trained",
        _LINEAR,
        "    if weights_ready and not (weight.requires_grad and _gradients_enabled()):\n",
        "    if weights_ready:\n",
        READY,
        "A layer loads weights that an optimizer may just be writing.",
    ),
    Fault(
        "workspace_made_twice",
        _WORKSPACE,
        "            found = _workspaces.get(key)  # another thread of this stream may have made "
        "it meanwhile\n",
        "            found = None\n",
        SUMS,
        "Threads that share a stream and come at once get a workspace each.",
    ),
    Fault(
        "workspace_of_another_context",
        _WORKSPACE,
        "return index, 0, driver.context()",
        "return index, 0, None",
        SUMS,
        "The default streams of two contexts share a workspace.",
    ),
    Fault(
        "workspace_of_another_thread",
        _WORKSPACE,
        "return index, handle, driver.context(), driver.thread()",
        "return index, handle, driver.context(), None",
        SUMS,
        "The per-thread streams of two threads share a workspace.",
    ),
    Fault(
        "workspace_of_a_destroyed_stream",
        _WORKSPACE,
        "return None if number is None else (index, handle, number)",
        "return None if number is None else (index, handle)",
        SUMS,
        "A new stream gets the workspace of a destroyed one with its handle.",
    ),
    Fault(
        "workspace_in_a_graph",
        _WORKSPACE,
        "    if torch.cuda.is_current_stream_capturing():\n",
        "    if False:\n",
        SUMS,
        "A captured graph keeps the workspace that later calls use.",
    ),
    Fault(
        "workspace_too_small",
        _WORKSPACE,
        "return self.sums.numel() >= floats and self.counters.numel() >= counters",
        "return self.sums.numel() >= floats or self.counters.numel() >= counters",
        SUMS,
        "A workspace with enough sums is lent, though its counters are too few.",
    ),
    Fault(
        "workspace_counters_not_zero",
        _WORKSPACE,
        "torch.zeros(counters, dtype=torch.int32, device=device),",
        "torch.empty(counters, dtype=torch.int32, device=device),",
        OPERANDS,
        "Counters begin as what the memory held.",
    ),
    Fault(
        "workspace_freed_under_a_kernel",
        _WORKSPACE,
        "                _retired.append(waiting)\n",
        "                pass\n",
        SUMS,
        "A workspace goes back to the allocator while a kernel of a foreign stream uses it.",
    ),
    Fault(
        "workspace_stream_not_recorded",
        _WORKSPACE,
        "            tensor.record_stream(stream)\n",
        "            pass\n",
        SUMS,
        "The allocator is not told which stream uses a workspace.",
    ),
    Fault(
        "unaligned_operand_not_copied",
        _COPIES,
        "if alignment < 16 or any(",
        "if alignment < 8 or any(",
        GEMM,
        "TMA is given an operand at a multiple of 8 bytes.",
    ),
    Fault(
        "copy_strides_swapped",
        _COPIES,
        "return (*batch, 1, outer) if by_columns else (*batch, outer, 1)",
        "return (*batch, outer, 1) if by_columns else (*batch, 1, outer)",
        GEMM,
        "The copy of an operand has the strides of its transpose.",
    ),
    Fault(
        "copy_batch_stride_of_a_matrix",
        _COPIES,
        "        size *= extent if stride else 1\n",
        "        size *= 1\n",
        GEMM,
        "Outer batch dimensions of a copy step by one matrix.",
    ),
    Fault(
        "row_vector_stored_as_column",
        _CANONICAL,
        "if by_columns and (problem.M > problem.N or not by_rows):",
        "if by_columns:",
        GEMM,
        "A single row of C is taken to lie along its column.",
    ),
    Fault(
        "swap_ab_undone",
        _CANONICAL,
        "return (transposed(problem), not swapped) if config.swap_ab else (problem, swapped)",
        "return (transposed(problem), True) if config.swap_ab else (problem, swapped)",
        GEMM,
        "A C by columns whose config swaps operands is taken for transposed.",
    ),
    Fault(
        "batch_offset_of_the_kernels_dimension",
        _CANONICAL,
        "looped = [stride for i, stride in enumerate(strides[:-2]) if i != batch_dim]",
        "looped = [stride for i, stride in enumerate(strides[:-2]) if i != 0]",
        GEMM,
        "The host's loop steps along the batch dimension that the kernel walks.",
    ),
    Fault(
        "batch_alignment_of_the_first",
        _CANONICAL,
        "return math.gcd(alignment, *(stride * problem.out_dtype.itemsize for stride in looped))",
        "return alignment",
        GEMM,
        "The alignment of the first matrix is promised for all of a batch.",
    ),
    Fault(
        "copies_not_handed_over",
        _LAUNCHER,
        "b = operand_copies.copy(b, shape_b, given.b, aligned.b)",
        "operand_copies.copy(b, shape_b, given.b, aligned.b)",
        OPERANDS,
        "B is copied, and the launch gets the operand all the same.",
    ),
    Fault(
        "workspace_dropped_before_the_launch",
        _LAUNCHER,
        "            finally:\n                if space.done is not None:\n",
        "            finally:\n                if space.done is None and size is None:\n",
        GEMM,
        "No event follows a kernel that uses a workspace of a foreign stream.",
    ),
    Fault(
        "source_staged_unaligned",
        "hopper/gemm/variant.py",
        "if may_be_staged and inner == 1 and in_granules and view.alignment >= 16:",
        "if may_be_staged and inner == 1 and in_granules:",
        ACCESS,
        "TMA is given a source of the epilogue at any address.",
    ),
    Fault(
        "bias_by_rows_read_by_columns",
        "hopper/gemm/variant.py",
        'return "rows"',
        'return "columns"',
        EPILOGUE,
        "A bias of the rows is read along the columns.",
    ),
    Fault(
        "pingpong_source_does_not_fit",
        "hopper/gemm/variant.py",
        "return stages + config.in_flight <= config.stages",
        "return stages <= config.stages",
        ACCESS,
        "In pingpong a source takes the stage that the last k tile still occupies.",
    ),
    Fault(
        "staggered_c_outgrows_its_rows",
        "hopper/gemm/epilogue_store.py",
        "return bool(same_bytes and count <= rows)",
        "return bool(same_bytes)",
        EPILOGUE,
        "Staggered consumers are given more of C than their rows of A have room for.",
    ),
)
