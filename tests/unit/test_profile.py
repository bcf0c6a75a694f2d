"""What a trace says and what it means, on events and measurements made by hand."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.observe.sheets import as_markdown, print_sheet
from flatout.tuning.bottleneck import (
    OUR_KERNELS,
    UPDATE_KERNELS,
    Measurements,
    judge,
    kind_of_kernel,
    kind_of_operator,
    read_trace,
)
from flatout.tuning.profile_page import sheet_of

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "flatout" / "ops" / "kernels"


# --- kinds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT", "matrix products"),
        ("ampere_sgemm_128x64_tn", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(Params)", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "matrix products"),
        ("triton_tem_fused_mm_3", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("_backward", "our kernels"),
        ("_rows", "our kernels"),
        ("_add_back", "our kernels"),
        ("_update", "optimizer"),
        ("_advance", "optimizer"),
        ("triton_poi_fused_gelu_1", "compiled code"),
        ("triton_red_fused_native_layer_norm_2", "compiled code"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<float>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::", "copies"),
        ("Memset (Device)", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMath>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("somebody_elses_kernel", "unknown"),
    ],
)
def test_the_kind_of_a_kernel(name: str, kind: str):
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::mm", "matrix products"),
        ("aten::addmm_", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::gelu", "elementwise"),
        ("aten::native_layer_norm_backward", "elementwise"),
        ("aten::copy_", "copies"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_foreach_norm", "optimizer"),
        ("aten::transpose", "bookkeeping"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "bookkeeping"),
        ("AddmmBackward0", "bookkeeping"),
        ("_LoraProduct", "bookkeeping"),
        ("CompiledFunction", "compiled code"),
        ("c10d::allreduce_", "communication"),
        ("record_param_comms", "communication"),
        ("mine::operator", "unknown"),
    ],
)
def test_the_kind_of_an_operator(name: str, kind: str):
    assert kind_of_operator(name) == kind


def test_every_kernel_that_an_h200_ever_ran_for_us_has_a_kind():
    rows = [json.loads(line) for line in (ROOT / "lab" / "step_profile.jsonl").read_text("utf-8").splitlines()]
    names = {kernel[0] for row in rows for kernel in row["kernels"]}
    assert len(names) > 30
    assert not [name for name in names if kind_of_kernel(name) == "unknown"]


def test_our_kernels_are_those_that_the_sources_launch():
    launched: set[str] = set()
    for path in KERNELS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        jitted = re.findall(r"@triton\.jit\ndef (\w+)\(", text)
        launched |= {name for name in jitted if re.search(rf"\b{name}\[", text)}
    assert launched == {*OUR_KERNELS, *UPDATE_KERNELS}


# --- traces -----------------------------------------------------------------------------------------------------------


def event(cat: str, name: str, start: float, length: float, thread: int = 1, correlation: int | None = None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "tid": thread, "args": args}


def test_a_trace_of_a_device_is_added_up_by_kernel_kind_and_range():
    events = [
        {"ph": "M", "name": "process_name", "ts": 0, "args": {"name": "python"}},
        event("user_annotation", "step", 0, 1000),
        event("user_annotation", "data", 0, 100),
        event("user_annotation", "micro-batch", 100, 500),
        event("user_annotation", "forward", 100, 200),
        event("user_annotation", "backward", 300, 300),
        event("user_annotation", "optimizer", 600, 100),
        event("gpu_user_annotation", "forward", 150, 700, thread=7),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 350, 5, thread=2, correlation=2),  # from a thread of autograd
        event("cuda_runtime", "cudaLaunchKernel", 610, 5, correlation=3),
        event("cuda_runtime", "cudaMemcpyAsync", 20, 5, correlation=4),
        event("kernel", "nvjet_product", 400, 300, thread=7, correlation=1),  # runs long after its range has ended
        event("kernel", "_backward", 700, 100, thread=7, correlation=2),
        event("kernel", "_backward", 750, 100, thread=8, correlation=2),  # at the same time, on another stream
        event("kernel", "void multi_tensor_apply_kernel", 900, 50, thread=7, correlation=3),
        event("gpu_memcpy", "Memcpy HtoD", 30, 10, thread=9, correlation=4),
        event("cpu_op", "aten::mm", 105, 50),
    ]
    facts = read_trace(events, 1, device=True)
    assert facts.busy_seconds == pytest.approx(510e-6)
    assert facts.by_kind() == pytest.approx(
        {"matrix products": 300e-6, "our kernels": 200e-6, "optimizer": 50e-6, "copies": 10e-6}
    )
    assert [kernel.name for kernel in facts.kernels][:2] == ["nvjet_product", "_backward"]
    assert facts.kernels[1].calls == 2
    found = {one.name: (one.device_seconds, one.host_seconds, one.depth) for one in facts.ranges}
    assert found["data"] == pytest.approx((10e-6, 100e-6, 0))
    assert found["micro-batch"] == pytest.approx((500e-6, 500e-6, 0))
    assert found["forward"] == pytest.approx((300e-6, 200e-6, 1))
    assert found["backward"] == pytest.approx((200e-6, 300e-6, 1))
    assert found["optimizer"] == pytest.approx((50e-6, 100e-6, 0))
    halved = read_trace(events, 2, device=True)
    assert halved.busy_seconds == pytest.approx(255e-6)
    assert halved.kernels[0].calls == 0.5


def test_communication_behind_other_kernels_is_hidden():
    events = [
        event("user_annotation", "step", 0, 100),
        event("user_annotation", "optimizer", 50, 50),
        event("user_annotation", "reduction", 50, 10),
        event("kernel", "nvjet_product", 100, 50, thread=7),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 120, 60, thread=8),
    ]
    facts = read_trace(events, 1, device=True)
    assert facts.by_kind()["communication"] == pytest.approx(60e-6)
    assert facts.exposed_seconds == pytest.approx(30e-6)
    assert {one.name: one.depth for one in facts.ranges} == {"optimizer": 0, "reduction": 1}
    assert read_trace(events, 1, device=False).exposed_seconds is None


def test_a_replayed_graph_is_one_launch_of_many_kernels():
    events = [
        event("user_annotation", "step", 0, 100),
        event("user_annotation", "micro-batch", 0, 50),
        event("cuda_runtime", "cudaGraphLaunch", 10, 5, correlation=1),
        *(event("kernel", "_forward", 100 + 10 * place, 8, thread=7, correlation=1) for place in range(5)),
    ]
    facts = read_trace(events, 1, device=True)
    assert [one.name for one in facts.ranges] == ["micro-batch"]
    assert facts.ranges[0].device_seconds == pytest.approx(40e-6)
    assert facts.kernels[0].calls == 5


def test_operators_of_a_cpu_count_without_those_inside_them():
    events = [
        event("user_annotation", "step", 0, 100),
        event("user_annotation", "forward", 0, 60),
        event("cpu_op", "aten::linear", 0, 50),
        event("cpu_op", "aten::t", 1, 4),
        event("cpu_op", "aten::addmm", 10, 30),
        event("cpu_op", "aten::copy_", 12, 5),
        event("cpu_op", "aten::gelu", 50, 10),
        event("cpu_op", "aten::index", 5, 90, thread=2),  # the loader's thread
    ]
    facts = read_trace(events, 1, device=False)
    own = {kernel.name: kernel.seconds for kernel in facts.kernels}
    assert own == pytest.approx(
        {"aten::linear": 16e-6, "aten::t": 4e-6, "aten::addmm": 25e-6, "aten::copy_": 5e-6, "aten::gelu": 10e-6}
    )
    assert facts.busy_seconds == pytest.approx(60e-6)
    assert sum(own.values()) == pytest.approx(facts.busy_seconds)
    assert facts.ranges[0].device_seconds is None


def test_a_trace_without_anything_is_no_time():
    facts = read_trace([], 3, device=True)
    assert (facts.busy_seconds, facts.kernels, facts.ranges, facts.by_kind()) == (0.0, (), (), {})


# --- verdicts ---------------------------------------------------------------------------------------------------------

HEALTHY = Measurements(  # GPT-2 124M on an H200, as lab/step_profile.jsonl has it
    device_kind="cuda",
    step_seconds=0.1065,
    profiled_step_seconds=0.112,
    busy_seconds=0.104,
    data_wait_seconds=0.0002,
    seconds_by_kind={
        "matrix products": 0.0701,
        "attention": 0.0158,
        "our kernels": 0.0159,
        "optimizer": 0.0014,
        "copies": 0.0007,
    },
    kernels_per_step=420,
    batch_tokens=65536,
    batch_setting="train.batch_tokens",
    flops=65536 * 8.55e8,
    peak_flops_per_second=989.4e12,
    micro_batch=64,
    accumulation=1,
    context=1024,
    streaming=False,
    used={
        "precision": "bf16",
        "kernels": "triton",
        "compile": "off",
        "cuda_graphs": "off",
        "attention": "cudnn+fa4",
        "loss": "fused",
        "residual": "bf16",
        "products": "tuned",
        "fp8": "[]",
        "checkpointing": "none",
        "fused_optimizer": "on",
        "loader": "device",
        "workers": "0",
    },
)


def changed(*, used: dict[str, str] | None = None, **values) -> Measurements:
    return dataclasses.replace(HEALTHY, used={**HEALTHY.used, **(used or {})}, **values)


def words_of(verdict) -> list[str]:
    return [advice.words for advice in verdict.advice]


def test_a_healthy_step_is_compute_bound_and_nothing_cheap_is_left():
    verdict = judge(HEALTHY)
    assert verdict.bottleneck == "compute-bound"
    assert "nothing cheap is left" in verdict.advice[0].why
    assert words_of(verdict)[1].startswith("speed.fp8=")
    assert any("MFU" in line for line in verdict.evidence)


def test_the_figures_of_a_step():
    measured = changed(
        step_seconds=0.2,
        busy_seconds=0.15,
        kernels_per_step=300,
        seconds_by_kind={"matrix products": 0.1, "attention": 0.02, "elementwise": 0.03},
        flops=24e12,
        peak_flops_per_second=480e12,
    )
    assert measured.busy_share == pytest.approx(0.75)
    assert measured.kernels_per_second == pytest.approx(1500)
    assert measured.mean_kernel_seconds == pytest.approx(0.0005)
    assert measured.tokens_per_second == pytest.approx(327_680)
    assert measured.mfu == pytest.approx(0.25)
    assert measured.product_flops_per_second == pytest.approx(200e12)
    assert measured.share_of("attention", "elementwise", "copies") == pytest.approx(1 / 3)
    assert "120.0 TFLOP/s over the whole step, MFU 25.0% of 480.0 TFLOP/s" in judge(changed(
        step_seconds=0.2, busy_seconds=0.19, flops=24e12, peak_flops_per_second=480e12,
    )).evidence  # fmt: skip
    assert changed(busy_seconds=0.2).busy_share == 1.0, "streams side by side are busy at the same time"
    unknown = changed(peak_flops_per_second=None, seconds_by_kind={}, flops=1e9)
    assert (unknown.mfu, unknown.product_flops_per_second, unknown.share_of("attention")) == (None, None, 0.0)
    assert "9.4 GFLOP/s over the whole step; the peak of this device is not known" in judge(unknown).evidence


def test_threads_that_wait_for_cores_are_no_computing():
    busy = {"device_kind": "cpu", "cores": 2.0, "cores_others": 1.6, "threads_waiting": 1.7}
    verdict = judge(changed(used={"threads": "2"}, **busy))
    assert verdict.bottleneck == "oversubscribed"
    assert "1.7 of them on average, while 2 compute and other processes use 1.6 of 2 cores" in verdict.sentence
    assert words_of(verdict) == ["speed.threads=1", ""]
    assert words_of(judge(changed(used={"threads": "1"}, **busy))) == [""], "one thread cannot become fewer"
    assert judge(changed(used={"threads": "2"}, **{**busy, "threads_waiting": 0.05})).bottleneck == "compute-bound"
    own = judge(changed(used={"threads": "8"}, **{**busy, "cores_others": 0.0}))
    assert words_of(own) == ["speed.threads=2"], "more threads than cores, and nobody else there"
    assert judge(changed(threads_waiting=1.7)).bottleneck == "compute-bound", "on a GPU other threads do the work"


def every_advice(measured: Measurements) -> list[str]:
    """The words of all that is proposed, also beyond the first few."""
    asked: list[str] = []
    judge(measured, lambda words: not asked.append(words))
    return asked


IDLE = {"step_seconds": 0.3, "accumulation": 2}
BYTES = {"seconds_by_kind": {"elementwise": 0.06, "matrix products": 0.04}}
WAITING = {"step_seconds": 0.3, "data_wait_seconds": 0.2}
HOST = {"loader": "host", "workers": "3"}


@pytest.mark.parametrize(
    ("values", "used", "expected"),
    [
        (WAITING, HOST, ["speed.loader=device", "speed.workers=6"]),
        (WAITING, {**HOST, "workers": "0"}, ["speed.loader=device", "speed.workers=2"]),
        (WAITING, {**HOST, "workers": ""}, ["speed.loader=device", "speed.workers=2"]),
        ({**WAITING, "device_kind": "cpu"}, HOST, ["speed.workers=6"]),
        ({**WAITING, "streaming": True}, HOST, []),
        ({**WAITING, "streaming": True}, {}, []),
        (IDLE, {}, ["speed.cuda_graphs=on", "speed.micro_batch=128"]),
        ({**IDLE, "accumulation": 1}, {}, ["speed.cuda_graphs=on"]),
        ({**IDLE, "accumulation": 16}, {"cuda_graphs": "on"}, ["speed.micro_batch=512"]),
        (
            {**IDLE, "accumulation": 1},
            {"cuda_graphs": "on", "kernels": "torch"},
            ["speed.kernels=triton", "speed.compile=reduce-overhead"],
        ),
        (
            {**IDLE, "accumulation": 1},
            {"cuda_graphs": "on", "kernels": "torch", "compile": "default", "fused_optimizer": "off"},
            ["speed.kernels=triton", "speed.fused_optimizer=on"],
        ),
        (BYTES, {}, []),
        (BYTES, {"residual": "fp32", "loss": "chunked"}, ["speed.loss=fused", "speed.residual=bf16"]),
        (BYTES, {"precision": "tf32", "fused_optimizer": "off"}, ["speed.precision=bf16"]),
        (BYTES, {"kernels": "torch", "residual": "fp32"}, ["speed.kernels=triton", "speed.compile=default"]),
        (BYTES, {"kernels": "torch", "compile": "default"}, ["speed.kernels=triton"]),
        (
            {"seconds_by_kind": {"optimizer": 0.03, "elementwise": 0.03, "matrix products": 0.04}},
            {"fused_optimizer": "off"},
            ["speed.fused_optimizer=on"],
        ),
        ({}, {"fp8": "[head]"}, []),
        ({}, {"fp8": "[head]", "products": "torch"}, ["speed.products=tuned"]),
        ({}, {"fp8": "[head]", "products": "torch", "kernels": "torch"}, []),
        ({}, {"precision": "fp16"}, []),
        ({}, {"precision": "tf32"}, ["speed.precision=bf16"]),
        ({}, {"fp8": "[head]", "attention": "reference"}, ["speed.attention=auto"]),
        ({}, {"fp8": "[head]", "checkpointing": "full"}, ["speed.checkpointing=none"]),
        ({"accumulation": 4}, {"fp8": "[head]"}, []),
        ({"accumulation": 4, "flops": 40e12}, {"fp8": "[head]"}, ["speed.micro_batch=128"]),
        ({"flops": 40e12}, {"fp8": "[head]"}, []),
        ({"device_kind": "cpu"}, {}, ["speed.compile=default"]),
        ({"device_kind": "cpu", "accumulation": 4}, {"compile": "default"}, []),
        (
            {"device_kind": "cpu", "accumulation": 4, "busy_seconds": 0.09},
            {"compile": "default"},
            ["speed.micro_batch=256"],
        ),
    ],
)
def test_what_is_proposed_is_what_is_not_in_use_yet(values: dict, used: dict[str, str], expected: list[str]):
    measured = changed(used=used, **values)
    assert every_advice(measured) == expected
    told = " ".join(advice.why for advice in judge(measured, lambda words: False).advice)
    assert ("a GPU: " in told) == (measured.device_kind != "cuda" and judge(measured).bottleneck == "compute-bound")
    high = measured.mfu is not None and measured.mfu > 0.4 and measured.used["precision"] in ("bf16", "fp16")
    compute = judge(measured).bottleneck == "compute-bound" and measured.device_kind == "cuda"
    assert ("nothing cheap is left" in told) == (compute and high)


def test_a_tiny_micro_batch_is_launch_bound():
    measured = changed(
        step_seconds=0.140,
        profiled_step_seconds=0.300,
        busy_seconds=0.050,
        seconds_by_kind={"matrix products": 0.020, "elementwise": 0.025, "attention": 0.005},
        kernels_per_step=9000,
        batch_tokens=8192,
        flops=8192 * 8.55e8,
        micro_batch=1,
        accumulation=8,
        used={"kernels": "torch", "loss": "plain"},
    )
    verdict = judge(measured)
    assert verdict.bottleneck == "launch-bound"
    assert words_of(verdict) == ["speed.cuda_graphs=on", "speed.micro_batch=8", "speed.kernels=triton"]
    assert "5.6 µs" in verdict.sentence
    assert "64%" in verdict.sentence


def test_waiting_for_gradients_is_communication_bound():
    waits = {"reduction_seconds": 0.3 * HEALTHY.step_seconds, "reduces_in": "fp32", "slowest": "rank 3"}
    verdict = judge(changed(used={"parallel": "data"}, **waits))
    assert verdict.bottleneck == "communication-bound"
    assert "(30%)" in verdict.sentence
    assert verdict.advice[0].why.startswith("look at rank 3")
    assert words_of(verdict)[1] == "parallel.reduce=bf16"
    narrow = judge(changed(used={"parallel": "data"}, **waits | {"reduces_in": "bf16"}))
    slices = judge(changed(used={"parallel": "fsdp"}, **waits))
    assert "parallel.reduce=bf16" not in words_of(narrow) + words_of(slices)
    little = judge(changed(reduction_seconds=0.1 * HEALTHY.step_seconds, reduces_in="fp32"))
    assert little.bottleneck == "compute-bound"


def test_what_the_profiler_adds_to_the_step_makes_nothing_launch_bound():
    assert judge(changed(profiled_step_seconds=0.9)).bottleneck == "compute-bound"


def test_torchs_own_operations_are_memory_bound():
    measured = changed(
        step_seconds=0.170,
        busy_seconds=0.168,
        seconds_by_kind={"matrix products": 0.075, "attention": 0.018, "elementwise": 0.055, "copies": 0.020},
        used={"kernels": "torch", "loss": "plain", "residual": "fp32", "products": "torch"},
    )
    verdict = judge(measured)
    assert verdict.bottleneck == "memory-bound"
    assert words_of(verdict) == ["speed.kernels=triton", "speed.compile=default", "speed.loss=fused"]
    assert "of its time: elementwise 33%, copies 12%" in verdict.evidence
    rare = {"matrix products": 60.0, "attention": 0.5, "copies": 20.0, "elementwise": 19.0, "optimizer": 0.5}
    assert "of its time: copies 20%, elementwise 19%" in judge(changed(seconds_by_kind=rare)).evidence


def test_a_slow_loader_is_data_bound():
    measured = changed(step_seconds=0.210, data_wait_seconds=0.104, used={"loader": "host", "workers": "1"})
    verdict = judge(measured)
    assert verdict.bottleneck == "data-bound"
    assert words_of(verdict)[:2] == ["speed.loader=device", "speed.workers=2"]
    assert "50%" in verdict.sentence
    assert "the device is busy 50% of the time, idle for data 50%" in verdict.evidence
    assert "now 1" in verdict.advice[1].why
    streamed = judge(dataclasses.replace(measured, streaming=True))
    assert streamed.bottleneck == "data-bound"
    assert "flatout prepare" in streamed.advice[0].why
    on_device = judge(changed(step_seconds=0.210, data_wait_seconds=0.104))
    assert words_of(on_device) == ["speed.loader=host speed.workers=4"]


def test_waiting_for_data_while_the_device_is_busy_costs_nothing():
    assert judge(changed(data_wait_seconds=0.090)).bottleneck == "compute-bound"


def test_the_larger_of_two_waits_names_the_bottleneck():
    slow_host = changed(step_seconds=0.200, data_wait_seconds=0.020)
    assert slow_host.idle_for_data_seconds == pytest.approx(0.020)
    assert slow_host.idle_for_host_seconds == pytest.approx(0.076)
    assert judge(slow_host).bottleneck == "launch-bound"
    assert judge(changed(step_seconds=0.200, data_wait_seconds=0.070)).bottleneck == "data-bound"


def test_fp32_is_compute_bound_and_bf16_is_proposed():
    measured = changed(
        step_seconds=1.15,
        busy_seconds=1.14,
        seconds_by_kind={"matrix products": 1.0, "attention": 0.08, "our kernels": 0.05, "optimizer": 0.01},
        used={"precision": "fp32", "residual": "fp32", "products": "torch", "attention": "sdpa (efficient)"},
    )
    verdict = judge(measured)
    assert verdict.bottleneck == "compute-bound"
    assert words_of(verdict)[:2] == ["speed.precision=bf16", "speed.precision=tf32"]
    assert "nothing cheap" not in str(verdict.advice)


@pytest.mark.parametrize("bottleneck", ["compute-bound", "memory-bound", "launch-bound", "data-bound"])
def test_what_is_not_possible_is_never_proposed_and_something_is_said_all_the_same(bottleneck: str):
    measured = {
        "compute-bound": changed(used={"precision": "fp32"}),
        "memory-bound": changed(seconds_by_kind={"elementwise": 0.06, "matrix products": 0.04}),
        "launch-bound": changed(step_seconds=0.3, accumulation=2),
        "data-bound": changed(step_seconds=0.3, data_wait_seconds=0.2),
    }[bottleneck]
    verdict = judge(measured, possible=lambda words: False)
    assert verdict.bottleneck == bottleneck
    assert verdict.advice
    assert not any(words_of(verdict))


@pytest.mark.parametrize(
    ("step", "word", "value", "unwanted"),
    [
        (0.3, "cuda_graphs", "on", "speed.cuda_graphs=on"),
        (0.3, "kernels", "triton", "speed.kernels=triton"),
        (0.1065, "fp8", "[up]", "speed.fp8"),
    ],
)
def test_what_is_in_use_is_not_proposed(step: float, word: str, value: str, unwanted: str):
    verdict = judge(changed(step_seconds=step, used={word: value}))
    assert not [words for words in words_of(verdict) if words.startswith(unwanted)]


def test_on_a_cpu_it_is_either_operators_or_data():
    cpu = changed(
        device_kind="cpu",
        peak_flops_per_second=None,
        step_seconds=0.5,
        busy_seconds=0.3,
        seconds_by_kind={"elementwise": 0.2, "matrix products": 0.1},
        used={"precision": "fp32", "kernels": "torch", "loader": "host", "workers": "1"},
    )
    verdict = judge(cpu)
    assert verdict.bottleneck == "compute-bound"
    assert words_of(verdict)[0] == "speed.compile=default"
    assert not any("cuda_graphs" in words for words in words_of(verdict))
    assert "not known" in " ".join(verdict.evidence)
    slow = judge(dataclasses.replace(cpu, data_wait_seconds=0.2))
    assert slow.bottleneck == "data-bound"
    assert words_of(slow)[0] == "speed.workers=2"


def test_the_rate_of_products_is_over_their_own_time():
    assert HEALTHY.product_flops_per_second == pytest.approx(HEALTHY.flops / 0.0859)
    assert changed(seconds_by_kind={"unknown": 0.1}).product_flops_per_second is None
    assert HEALTHY.mean_kernel_seconds == pytest.approx(0.1039 / 420)


# --- memory, page -----------------------------------------------------------------------------------------------------


def report(**changes) -> dict:
    verdict = judge(HEALTHY)
    part = {"depth": 1, "device_seconds": 0.03, "host_seconds": 0.01, "calls": 8.0}
    return {
        "flatout": "0.1",
        "torch": "2.11",
        "config": "gpt2-124m",
        "device": "NVIDIA H200",
        "device_kind": "cuda",
        "data": "random tokens",
        "parameters": 124_000_000,
        "context": 1024,
        "micro_batch": 64,
        "accumulation": 8,
        "used": HEALTHY.used,
        "timed_steps": 10,
        "profiled_steps": 4,
        "step_seconds": 0.1065,
        "profiled_step_seconds": 0.2,
        "busy_seconds": 0.104,
        "idle_for_data_seconds": 0.0002,
        "idle_for_host_seconds": 0.0023,
        "seconds_by_kind": HEALTHY.seconds_by_kind,
        "ranges": [{**part, "name": "micro-batch", "depth": 0}, {**part, "name": "forward"}],
        "tokens_per_second": 615_000.0,
        "flops_per_second": 5.2e14,
        "peak_flops_per_second": 9.894e14,
        "mfu": 0.53,
        "product_flops_per_second": 6.5e14,
        "kernels_per_step": 420.0,
        "kernels_per_second": 4000.0,
        "mean_kernel_seconds": 250e-6,
        "memory": [{"name": "weights", "measured": 497_000_000, "estimated": None}],
        "top": [{"name": "nvjet", "kind": "matrix products", "seconds": 0.0161, "calls": 48.0}],
        "verdict": dataclasses.asdict(verdict),
        "files": ["trace.json.gz", "kernels.csv"],
        "notices": [],
        **changes,
    }


def test_the_page_says_the_answer_first_and_then_its_figures(capsys: pytest.CaptureFixture):
    blocks = sheet_of(report(), "profile/here")
    text = as_markdown(blocks)
    assert text.startswith("# gpt2-124m: compute-bound\n")
    assert text.index("nothing cheap is left") < text.index("Where the step's time goes")
    for figure in ("MFU 53.0% of 989.4 TFLOP/s", "200.0 ms", "474.0 MiB", "615,000"):
        assert figure in text, figure
    print_sheet(blocks)
    shown = capsys.readouterr().out
    assert "615,000" in shown
    assert "\x1b" not in shown
    assert not [line for line in shown.splitlines() if line != line.rstrip()]


def test_the_page_of_several_ranks_names_the_slowest():
    assert "Ranks" not in as_markdown(sheet_of(report()))
    ranks = {
        "step_seconds": [0.1] * 20,
        "busy_seconds": [0.09] * 19 + [0.099],
        "reduction_seconds": [0.01] * 19 + [0.001],
        "reduced_bytes": 500 * 2**20,
        "sent_bytes": 950 * 2**20,
        "exposed_seconds": 0.02,
    }
    kinds = {**HEALTHY.seconds_by_kind, "communication": 0.03}
    text = as_markdown(sheet_of(report(ranks=ranks, seconds_by_kind=kinds)))
    for words in (
        "a step in each of 20 ranks",
        "slowest rank: rank 19, 10.0% above the median",
        "each rank sends 950.0 MiB",
    ):
        assert words in text, words
    assert "20.0 of 30.0 ms (under the profiler)" in text
    assert "the 16 slowest of 20 ranks" in text
    assert "| 19 | 100.0 | 99.0 | 1.0 | 1.0% |" in text


def test_hostile_names_stay_inert(capsys: pytest.CaptureFixture):
    evil = "void `k|ernel`<script>alert(1)</script>\x1b[2J\n| a | b |"
    kernel = {"name": evil, "kind": "unknown", "seconds": 0.01, "calls": 1.0}
    made = report(top=[kernel], data=f"[x](javascript:1) {evil}", notices=[evil])
    text = as_markdown(sheet_of(made, evil))
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `void"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 6, "five cells and no more"
    code_taken_out = re.sub(r"`[^`]*`", "", text)
    assert "<script" not in code_taken_out
    assert "[x](" not in text.replace("\\[", "")
    print_sheet(sheet_of(made, evil))
    assert "\x1b[2J" not in capsys.readouterr().out


def test_a_page_for_a_cpu_speaks_of_operators():
    part = {"name": "data", "depth": 0, "device_seconds": None, "host_seconds": 0.01, "calls": 1.0}
    changes = {"mfu": None, "peak_flops_per_second": None, "ranges": [part]}
    text = as_markdown(sheet_of(report(device_kind="cpu", product_flops_per_second=None, **changes)))
    assert "peak not known" in text
    assert "Longest operators" in text
    assert "on the device" not in text


def test_a_small_bar_is_none_and_a_share_above_one_is_a_full_one():
    text = as_markdown(sheet_of(report(busy_seconds=0.2, step_seconds=0.1)))
    assert "█" * 20 in text
    assert "█" * 21 not in text


def test_names_are_taken_off_a_step_even_after_an_error():
    from flatout.tuning.profile import named_ranges

    def fail(*_values: object) -> None:
        raise RuntimeError("out of luck")

    step = SimpleNamespace(run_micro_batch=fail, _update=fail, model=fail, reducer=fail)
    before = dict(vars(step))

    def named_step() -> None:
        with named_ranges(step):  # pyright: ignore[reportArgumentType]
            assert vars(step).keys() == before.keys()
            assert all(vars(step)[name] is not before[name] for name in before)
            step.run_micro_batch(1, 2, 3)

    with pytest.raises(RuntimeError, match="luck"):
        named_step()
    assert vars(step) == before
