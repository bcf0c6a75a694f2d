"""Asked, used, why: every rule of the `speed` section, on devices that need not be here."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from flatout.config.facts import options_of, spot_at
from flatout.config.load import load_config
from flatout.config.schema import SpeedConfig
from flatout.config.source import DEFAULT, IN_PYTHON, Source
from flatout.device import Device
from flatout.errors import HardwareError
from flatout.host import THREAD_VARIABLES, ThreadTrial
from flatout.model.compiling import graphs_of_its_own
from flatout.records import Feature
from flatout.resolve import switches
from flatout.resolve.case import Probes
from flatout.resolve.switches import Speed, resolve_speed

HOPPER = Device(torch_device=torch.device("cuda", 0), name="NVIDIA H200", memory_bytes=2**37, capability=(9, 0))
BLACKWELL = Device(torch_device=torch.device("cuda", 0), name="B200", memory_bytes=2**37, capability=(10, 0))
AMPERE = Device(torch_device=torch.device("cuda", 0), name="RTX 3090", memory_bytes=2**34, capability=(8, 6))
TURING = Device(torch_device=torch.device("cuda", 0), name="T4", memory_bytes=2**34, capability=(7, 5))
PASCAL = Device(torch_device=torch.device("cuda", 0), name="P40", memory_bytes=2**34, capability=(6, 1))
CPU = Device(torch_device=torch.device("cpu"), name="cpu", memory_bytes=2**34, capability=None)
MPS = Device(torch_device=torch.device("mps"), name="mps", memory_bytes=None, capability=None)
MINE = Source("file", "mine.yaml:3")
LARGE = ["model.layers=12", "model.width=768", "model.heads=12", "model.context=1024", "train.batch_tokens=65536"]


def probes(**answers) -> Probes:
    """A machine on which everything works, unless told otherwise."""
    defaults = {
        "attention": lambda *a, **k: None,
        "picked": lambda *a, **k: "flash",
        "documents": lambda *a, **k: None,
        "compiler": lambda device: None,
        "products": lambda: None,
        "threads": lambda *shape: ThreadTrial(seconds={1: 1.0, 2: 0.6, 4: 0.5}, cores=4, others=0.0),
        "triton": lambda: True,
    }
    return Probes(**(defaults | answers))


def resolve(device: Device, *words: str, written: bool = False, using: Probes | None = None) -> Speed:
    config = load_config("gpt2-124m", [*LARGE, "train.steps=1", "data.source=shakespeare", *words]).config
    names = {word.partition("=")[0] for word in words}
    return resolve_speed(
        config,
        device,
        10**6,
        lambda path: MINE if written and path in names else DEFAULT,
        vocab=50257,
        probes=using or probes(),
    )


def feature(speed: Speed, name: str) -> Feature:
    return next(f for f in speed.features if f.name == name)


def used(speed: Speed, name: str) -> tuple[str, str]:
    found = feature(speed, name)
    return found.used, found.why


def test_every_switch_answers_once():
    names = [f.name for f in resolve(HOPPER).features]
    assert sorted(names) == sorted(SpeedConfig.model_fields)


def test_a_hopper_takes_the_fast_path_by_itself():
    speed = resolve(HOPPER)
    assert (speed.precision, speed.compile, speed.cuda_graphs) == ("bf16", "off", True)
    how = speed.execution
    assert (how.kernels, how.attention, how.loss, how.residual) == ("triton", "cudnn+fa4", "fused", "bf16")


def switch_words() -> Iterator[str]:
    """Every switch with each of its values; of numbers, some."""
    for name in SpeedConfig.model_fields:
        for option in options_of(spot_at(["speed", name]).described):
            items = option.get("items", {}).get("enum", [])
            values = option.get("enum") or [f"[{item}]" for item in items] or SOME.get(option.get("type", ""), [])
            yield from (f"speed.{name}={value}" for value in values)


SOME = {"boolean": ["true", "false"], "integer": ["16"]}


@pytest.mark.parametrize(
    ("device", "more", "works"),
    [
        (HOPPER, ("train.deterministic=true", "model.dropout=0.1"), False),
        (TURING, ("data.documents=apart",), True),
        (CPU, (), False),
        (MPS, ("model.family=gpt", "model.pattern=EEEA", "model.states=64"), True),
    ],
)
def test_what_the_hint_of_a_refused_switch_says_is_not_refused(device: Device, more: tuple[str, ...], works: bool):
    """Whatever the user writes is taken, or the hint names values that are."""
    no = probes(attention=lambda *_, **__: "no", picked=lambda *_, **__: None, documents=lambda *_, **__: "no",
                compiler=lambda _: "no", products=lambda: "no", triton=lambda: False)  # fmt: skip
    using, applied = probes() if works else no, 0
    for word in (*switch_words(), "speed.micro_batch=24"):
        try:
            resolve(device, *more, word, written=True, using=using)
        except HardwareError as error:
            name, _, values = error.hint.removeprefix("set ").partition("=")
            for value in values.split(", or "):
                resolve(device, *more, f"{name}={value}", written=True, using=using)
                applied += 1
    assert applied >= 8


# --- eigenstates ------------------------------------------------------------------------------------------------------

STATES = ("model.family=gpt", "model.pattern=EEEA", "model.states=64")


def test_the_scan_is_in_our_kernels_where_they_run():
    assert used(resolve(HOPPER, *STATES), "scan") == ("triton", "")
    assert resolve(HOPPER, *STATES).execution.scan == "triton"
    assert used(resolve(HOPPER, *STATES, "speed.scan=chunked", written=True), "scan") == ("chunked", "")
    assert used(resolve(HOPPER, *STATES, "speed.kernels=torch"), "scan") == ("triton", ""), "it stands by itself"
    for device in (CPU, MPS):
        assert used(resolve(device, *STATES), "scan") == ("chunked", "")
    bare = probes(triton=lambda: False)
    assert used(resolve(HOPPER, *STATES, using=bare), "scan") == ("chunked", "")
    assert used(resolve(CPU, *STATES, "speed.scan=triton"), "scan")[0] == "chunked"
    with pytest.raises(HardwareError, match=r"speed\.scan is triton, but our kernels run on CUDA devices only"):
        resolve(CPU, *STATES, "speed.scan=triton", written=True)


def test_without_states_there_is_no_scan():
    assert feature(resolve(HOPPER), "scan").used == "none"
    with pytest.raises(HardwareError, match=r"no block of model\.pattern=A is E"):
        resolve(HOPPER, "speed.scan=triton", written=True)


def test_without_attention_no_kernel_of_it_is_tried():
    def never(*_a, **_k) -> str:
        raise AssertionError("there is nothing to try")

    alone = ("model.family=gpt", "model.pattern=E")
    speed = resolve(HOPPER, *alone, using=probes(attention=never, picked=never))
    assert used(speed, "attention") == ("sdpa", "no block has attention")
    with pytest.raises(HardwareError, match="no block has attention"):
        resolve(HOPPER, *alone, "speed.attention=cudnn", written=True)


def test_8_bit_products_need_states_that_fit():
    assert used(resolve(HOPPER, *STATES, "speed.fp8=[qkv, out]"), "fp8") == ("[qkv, out]", "")
    why = used(resolve(HOPPER, *STATES, "model.states=60", "speed.fp8=[qkv]"), "fp8")[1]
    assert "states has 120" in why


# --- documents apart --------------------------------------------------------------------------------------------------


def test_documents_apart_are_read_on_the_host_and_attended_by_bounds():
    words = ("model.family=gpt", "data.documents=apart")
    speed = resolve(HOPPER, *words)
    assert speed.execution.document_attention == "fa4"
    assert used(speed, "loader") == ("host", "documents are laid out there")
    assert used(speed, "cuda_graphs") == ("off", "rows hold other documents at every step")
    assert used(speed, "kernels") == ("triton", "")
    assert used(resolve(HOPPER, *words, "speed.precision=fp32"), "kernels")[0] == "torch"
    with pytest.raises(HardwareError, match="documents are laid out there"):
        resolve(HOPPER, *words, "speed.loader=device", written=True)
    states = resolve(HOPPER, *words, "model.pattern=E", "speed.precision=fp32")
    assert used(states, "kernels") == ("triton", ""), "nothing attends, so there is no mask"
    assert all(one.name != "document_attention" for one in states.features)


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "words", "expected"),
    [
        (HOPPER, [], "cudnn+fa4"),
        (HOPPER, ["speed.kernels=torch"], "cudnn"),  # compiled, and a compiler cannot look into FlashAttention-4
        (HOPPER, ["model.context=8192"], "fa4"),
        (HOPPER, ["model.heads=6"], "fa4"),
        (HOPPER, ["model.heads=6", "model.context=32768"], "fa4"),
        (HOPPER, ["model.heads=8"], "cudnn"),  # heads of 96 were not measured, nor was Blackwell
        (BLACKWELL, [], "cudnn"),
        (HOPPER, ["speed.precision=fp32"], "sdpa"),
        (AMPERE, [], "sdpa"),
        (CPU, [], "sdpa"),
        (MPS, [], "sdpa"),
        (CPU, ["speed.attention=reference"], "reference"),
        (AMPERE, ["speed.attention=cudnn"], "cudnn"),
        (HOPPER, ["speed.attention=sdpa"], "sdpa"),
    ],
)
def test_attention_backend(device, words, expected):
    speed = resolve(device, *words)
    assert speed.execution.attention == expected
    assert feature(speed, "attention").used == ("sdpa (flash)" if expected == "sdpa" else expected)


def test_without_flash_attention_4_a_hopper_takes_cudnn():
    missing = probes(attention=lambda backend, *a, **k: "not installed" if "fa4" in backend else None)
    assert used(resolve(HOPPER, using=missing), "attention") == ("cudnn", "")


def test_a_kernel_that_fails_its_trial_falls_back_with_the_reason():
    broken = probes(attention=lambda backend, *a, **k: f"{backend} has no kernel for this", picked=lambda *a, **k: None)
    speed = resolve(HOPPER, using=broken)
    assert used(speed, "attention") == ("sdpa", "cudnn has no kernel for this")
    assert resolve(HOPPER, "speed.attention=flash", using=broken).execution.attention == "sdpa"
    with pytest.raises(HardwareError, match="flash has no kernel") as caught:
        resolve(HOPPER, "speed.attention=flash", written=True, using=broken)
    assert caught.value.hint == "set speed.attention=auto, or sdpa"


def test_the_trial_sees_the_models_shapes_and_the_runs_arithmetic():
    seen = {}

    def trial(backend, device, **facts):
        seen.update(facts, backend=backend)

    resolve(HOPPER, "model.dropout=0.1", "speed.attention=efficient", using=probes(attention=trial))
    shape = {"heads": 12, "groups": 12, "size": 64, "context": 1024, "dropout": 0.1}
    assert seen == {"backend": "efficient", "precision": "bf16", "deterministic": False, **shape}


def test_deterministic_runs_avoid_cudnn():
    speed = resolve(HOPPER, "train.deterministic=true")
    assert speed.execution.attention == "sdpa"
    assert "not deterministic" in feature(speed, "attention").why
    with pytest.raises(HardwareError, match="not deterministic"):
        resolve(HOPPER, "train.deterministic=true", "speed.attention=cudnn", written=True)
    assert resolve(HOPPER, "train.deterministic=true", "speed.attention=flash").execution.attention == "flash"


def test_what_the_user_wrote_and_cannot_have_is_refused_with_its_place():
    with pytest.raises(HardwareError, match=r"^mine\.yaml:3: speed\.attention is cudnn, but only CUDA"):
        resolve(CPU, "speed.attention=cudnn", written=True)
    config = load_config("gpt2-124m", ["speed.attention=cudnn", "train.steps=1", "data.source=shakespeare"]).config
    with pytest.raises(HardwareError, match=r"^speed\.attention is cudnn"):
        resolve_speed(config, CPU, 10**6, lambda _: IN_PYTHON, probes=probes())


def test_flash_attention_4_is_not_compiled_and_not_deterministic():
    assert used(resolve(HOPPER, "speed.attention=fa4"), "attention") == ("fa4", "")
    for backend in ("fa4", "cudnn+fa4"):
        speed = resolve(HOPPER, f"speed.attention={backend}", "speed.kernels=torch")
        assert used(speed, "compile") == ("off", "it cannot look into FlashAttention-4")
    with pytest.raises(HardwareError, match="compile is default, but it cannot look into FlashAttention-4"):
        resolve(HOPPER, "speed.attention=fa4", "speed.compile=default", written=True)
    with pytest.raises(HardwareError, match="FlashAttention-4's backward is not deterministic"):
        resolve(HOPPER, "speed.attention=fa4", "train.deterministic=true", written=True)
    assert resolve(CPU, "speed.attention=fa4").execution.attention == "sdpa"


# --- kernels and compile ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "words", "kernels", "compiled"),
    [
        (HOPPER, [], "triton", "off"),
        (AMPERE, [], "triton", "off"),
        (TURING, [], "torch", "default"),
        (PASCAL, [], "torch", "off"),
        (CPU, [], "torch", "off"),
        (MPS, [], "torch", "off"),
        (HOPPER, ["model.dropout=0.1"], "triton", "off"),
        (HOPPER, ["model.dropout=0.1", "speed.micro_batch=1"], "torch", "default"),
        (HOPPER, ["model.dropout=0.1", "speed.micro_batch=1", "speed.kernels=triton"], "triton", "off"),
        (HOPPER, ["model.residual_scale=0.1", "model.family=gpt"], "triton", "off"),
        (HOPPER, ["speed.kernels=torch"], "torch", "default"),
        (HOPPER, ["speed.kernels=torch", "speed.compile=off"], "torch", "off"),
        (HOPPER, ["speed.compile=off"], "triton", "off"),
        (HOPPER, ["speed.compile=regional"], "torch", "regional"),
        (HOPPER, ["speed.compile=max-autotune"], "torch", "max-autotune"),
        (HOPPER, ["speed.compile=reduce-overhead"], "torch", "reduce-overhead"),
        (HOPPER, ["speed.fused_qkv=false"], "torch", "default"),
        (CPU, ["speed.compile=default"], "torch", "default"),
        (CPU, ["speed.compile=regional"], "torch", "regional"),
        (CPU, ["speed.compile=reduce-overhead"], "torch", "default"),
        (HOPPER, ["speed.compile=regional", "speed.checkpointing=selective"], "torch", "default"),
    ],
)
def test_kernels_and_compile_mode(device, words, kernels, compiled):
    speed = resolve(device, *words)
    assert (speed.execution.kernels, speed.compile) == (kernels, compiled)
    for name, asked in (("kernels", "auto"), ("compile", "auto")):
        answer = feature(speed, name)
        if answer.asked not in (asked, answer.used):
            assert answer.why, f"{name} fell back in silence"


@pytest.mark.parametrize(
    "word",
    ["norm=offset-rmsnorm", "norm_place=both", "mlp=geglu", "rope_share=0.5", "qk_norm_whole=true", "score_divisor=9",
     "attention_cap=50.0"],
)  # fmt: skip
def test_a_model_that_our_kernels_do_not_know_has_torchs(word):
    words = ("model.family=gpt", f"model.{word}")
    assert used(resolve(HOPPER, *words), "kernels") == ("torch", f"they do not know model.{word}")
    with pytest.raises(HardwareError, match=f"speed.kernels is triton, but they do not know model.{word}"):
        resolve(HOPPER, *words, "speed.kernels=triton", written=True)
    with_cap = "attention_cap" in word
    assert (used(resolve(HOPPER, *words), "attention")[0] == "reference") == with_cap
    assert (used(resolve(CPU, *words), "attention")[0] == "reference") == with_cap


def test_dropout_leaves_our_kernels_where_launching_them_costs_little():
    """On an H200 compiled steps with dropout took 1.4 and 1.8 times as long here as ours without dropout."""
    sixty = ["model.layers=8", "model.width=512", "model.heads=4", "model.dropout=0.1", "speed.micro_batch=64"]
    fifteen = ["model.layers=4", "model.width=256", "model.heads=4", "model.dropout=0.1", "speed.micro_batch=64"]
    for words in (sixty, fifteen):
        speed = resolve(HOPPER, *words, "train.batch_tokens=65536")
        assert speed.execution.kernels == "triton"
        assert used(speed, "cuda_graphs")[0] == "off"
    small = resolve(HOPPER, *fifteen[:-1], "speed.micro_batch=4", "train.batch_tokens=65536")
    assert used(small, "kernels") == (
        "torch",
        "steps with dropout are not recorded, and compiled code launches fewer kernels",
    )


def test_compile_that_was_asked_for_turns_our_kernels_off_and_says_so():
    assert used(resolve(HOPPER, "speed.compile=default", written=True), "kernels") == ("torch", "compile was asked for")


def test_triton_and_compile_cannot_both_be_written():
    with pytest.raises(HardwareError, match=r"speed\.compile is default, but the Triton kernels") as caught:
        resolve(HOPPER, "speed.kernels=triton", "speed.compile=default", written=True)
    assert caught.value.hint == "set speed.compile=auto, or off"
    speed = resolve(HOPPER, "speed.kernels=triton", "speed.compile=default")
    assert (speed.execution.kernels, speed.compile) == ("triton", "off"), "from a preset it is a fallback"


def test_a_compiler_or_triton_that_is_missing_is_the_reason():
    broken = probes(compiler=lambda device: "torch.compile failed: no C compiler")
    assert used(resolve(HOPPER, "speed.kernels=torch", using=broken), "compile") == (
        "off",
        "torch.compile failed: no C compiler",
    )
    without = probes(triton=lambda: False)
    speed = resolve(HOPPER, using=without)
    assert used(speed, "kernels") == ("torch", "triton is not installed")
    assert used(speed, "compile") == ("off", "triton is not installed")
    with pytest.raises(HardwareError, match="triton is not installed"):
        resolve(HOPPER, "speed.kernels=triton", written=True, using=without)


def test_separate_projections_need_torchs_kernels():
    with pytest.raises(HardwareError) as caught:
        resolve(HOPPER, "speed.fused_qkv=false", "speed.kernels=triton", written=True)
    assert caught.value.hint == "set speed.fused_qkv=true", "there is no auto to offer"
    assert resolve(HOPPER, "speed.fused_qkv=false").execution.fused_qkv is False


# --- CUDA graphs ------------------------------------------------------------------------------------------------------

SMALL = ["model.layers=4", "model.width=256", "model.heads=4", "model.context=256", "train.batch_tokens=4096"]


def test_small_micro_batches_are_recorded_and_large_ones_are_not():
    small, large = resolve(HOPPER, *SMALL), resolve(HOPPER, "speed.attention=cudnn")
    assert small.cuda_graphs
    assert "longer than running" in feature(small, "cuda_graphs").why
    assert not large.cuda_graphs
    assert "keep the device busy" in feature(large, "cuda_graphs").why
    for size in ("1", "32"):
        assert resolve(HOPPER, f"speed.micro_batch={size}", "speed.attention=cudnn").cuda_graphs
    assert resolve(HOPPER).cuda_graphs, "FlashAttention-4 takes the host longer than other kernels"
    assert resolve(HOPPER, "speed.cuda_graphs=on").cuda_graphs
    assert not resolve(HOPPER, *SMALL, "speed.cuda_graphs=off").cuda_graphs


def test_a_slower_card_needs_no_recording_of_the_same_micro_batch():
    four = ["speed.micro_batch=4", "speed.attention=sdpa"]
    assert resolve(HOPPER, *four).cuda_graphs
    assert not resolve(dataclasses.replace(HOPPER, name="NVIDIA T4"), *four).cuda_graphs
    unknown = dataclasses.replace(HOPPER, name="NVIDIA Something")
    assert resolve(unknown, *four[1:], "speed.micro_batch=1").cuda_graphs
    assert not resolve(unknown, *four[1:], "speed.micro_batch=8").cuda_graphs


@pytest.mark.parametrize(
    ("device", "words", "reason"),
    [
        (CPU, [], "only CUDA"),
        (HOPPER, ["model.dropout=0.1"], "dropout"),
        (HOPPER, ["speed.compile=reduce-overhead"], "graphs of its own"),
    ],
)
def test_what_cannot_be_recorded(device, words, reason):
    words = [*SMALL, *words, "speed.cuda_graphs=on"]
    speed = resolve(device, *words)
    assert not speed.cuda_graphs
    assert reason in feature(speed, "cuda_graphs").why
    with pytest.raises(HardwareError, match=r"speed\.cuda_graphs is on"):
        resolve(device, *words, written=True)


def test_compiled_code_is_recorded_only_when_asked():
    speed = resolve(HOPPER, *SMALL, "speed.compile=default")
    assert not speed.cuda_graphs
    assert resolve(HOPPER, *SMALL, "speed.compile=default", "speed.cuda_graphs=on").cuda_graphs
    assert resolve(HOPPER, *SMALL, "speed.compile=max-autotune", "speed.cuda_graphs=on").cuda_graphs
    assert not resolve(HOPPER, *SMALL, "speed.compile=max-autotune").cuda_graphs
    assert graphs_of_its_own("max-autotune", our_graphs=False)
    assert not graphs_of_its_own("max-autotune", our_graphs=True)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_optimizer_state_and_offload():
    assert resolve(HOPPER, "speed.optimizer_state=8bit").optimizer_state == "8bit"
    assert resolve(CPU, "speed.optimizer_state=8bit").optimizer_state == "8bit"
    assert resolve(HOPPER, "speed.optimizer_offload=true").optimizer_offload
    assert used(resolve(MPS, "speed.optimizer_state=8bit"), "optimizer_state") == (
        "fp32",
        "8-bit moments are not tested on MPS",
    )
    both = ["speed.optimizer_state=8bit", "speed.optimizer_offload=true"]
    assert used(resolve(HOPPER, *both), "optimizer_state") == ("fp32", "offloaded moments stay in fp32")
    with pytest.raises(HardwareError, match="offloaded moments stay in fp32"):
        resolve(HOPPER, *both, written=True)
    with pytest.raises(HardwareError, match="only CUDA devices have it") as caught:
        resolve(CPU, "speed.optimizer_offload=true", written=True)
    assert caught.value.hint == "set speed.optimizer_offload=false"


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        (HOPPER, "auto", "bf16"),
        (TURING, "auto", "fp16"),
        (TURING, "bf16", "fp16"),
        (TURING, "tf32", "fp16"),
        (TURING, "fp32", "fp32"),
        (CPU, "auto", "fp32"),
        (CPU, "bf16", "bf16"),
        (CPU, "fp16", "fp32"),
        (MPS, "bf16", "fp32"),
    ],
)
def test_precision(device, asked, expected):
    speed = resolve(device, f"speed.precision={asked}")
    assert speed.precision == expected
    if asked not in ("auto", expected):
        assert feature(speed, "precision").why


def test_fp8_needs_sizes_and_a_loss_that_fit():
    odd = resolve(HOPPER, "speed.fp8=[up]", "model.family=gpt", "model.mlp=gelu", "model.mlp_width=1000")
    assert used(odd, "fp8") == ("[]", "8-bit products need sizes that are multiples of 16, and mlp has 1000")
    plain = resolve(HOPPER, "speed.fp8=[head]", "speed.loss=plain")
    assert used(plain, "fp8") == ("[]", "the head in 8 bits needs the fused loss, and loss is plain")
    assert resolve(HOPPER, "speed.fp8=[head]").execution.fp8 == ("head",)


def test_fp8_and_residual_need_our_kernels():
    assert resolve(HOPPER, "speed.fp8=[up, down]").execution.fp8 == ("up", "down")
    assert used(resolve(AMPERE, "speed.fp8=[up]"), "fp8") == ("[]", "RTX 3090 has no 8-bit matrix units")
    assert used(resolve(HOPPER, "speed.fp8=[up]", "speed.kernels=torch"), "fp8")[0] == "[]"
    assert resolve(HOPPER, "speed.precision=fp16").execution.residual == "fp32"
    assert resolve(HOPPER, "speed.kernels=torch").execution.residual == "fp32"


# --- fine-tuning ------------------------------------------------------------------------------------------------------

CHAT = ["chat.source=rows.jsonl", "model.init_from=folder", "lora.rank=16", "train.steps=1"]


def fine_tuned(device: Device, *words: str, written: bool = False, using: Probes | None = None) -> Speed:
    config = load_config("lora", [*CHAT, *words]).config
    names = {word.partition("=")[0] for word in words}
    find = lambda path: MINE if written and path in names else DEFAULT  # noqa: E731
    return resolve_speed(config, device, None, find, vocab=32000, probes=using or probes())


def test_adapters_have_our_kernels():
    speed = fine_tuned(HOPPER)
    how = speed.execution
    assert (how.kernels, how.loss, how.residual, how.products) == ("triton", "fused", "bf16", "torch")
    assert used(speed, "products") == ("torch", "samples make other shapes at every step")
    assert used(speed, "compile")[0] == "off"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["lora.dora=true"], "they have no DoRA"),
        (["lora.dropout=0.1"], "they have no dropout on adapters"),
    ],
)
def test_adapters_that_our_kernels_do_not_know(words, reason):
    assert used(fine_tuned(HOPPER, *words), "kernels") == ("torch", reason)
    with pytest.raises(HardwareError, match=reason):
        fine_tuned(HOPPER, *words, "speed.kernels=triton", written=True)


@pytest.mark.parametrize("word", ["speed.precision=fp32", "train.deterministic=true"])
def test_samples_that_need_a_mask_stay_in_their_rows(word):
    assert "rows one by one" in feature(fine_tuned(HOPPER, word), "kernels").why
    assert fine_tuned(HOPPER, word, "speed.kernels=triton").execution.kernels == "triton"


def test_beside_frozen_weights_the_residual_stream_has_their_type():
    assert used(fine_tuned(HOPPER, "speed.kernels=torch"), "residual") == ("bf16", "")
    assert used(fine_tuned(HOPPER, "speed.kernels=torch", "lora.rank=0"), "residual")[0] == "fp32"


def test_adapters_have_no_8_bit_products():
    with pytest.raises(HardwareError, match="adapters have no 8-bit products"):
        fine_tuned(HOPPER, "speed.fp8=[up]", written=True)


@pytest.mark.parametrize(
    ("device", "words", "expected"),
    [
        (HOPPER, [], ("fa4", "")),
        (HOPPER, ["speed.attention=cudnn"], ("flash", "cudnn knows no bounds")),
        (HOPPER, ["speed.attention=reference"], ("reference", "")),
        (AMPERE, ["speed.attention=flash"], ("flash", "")),
        (HOPPER, ["speed.precision=fp32"], ("sdpa", "precision is fp32")),
        (TURING, [], ("sdpa", "T4 is older than Ampere")),
        (CPU, [], ("sdpa", "")),
    ],
)
def test_attention_inside_packed_documents_is_told(device, words, expected):
    speed = fine_tuned(device, *words)
    assert used(speed, "document_attention") == expected
    assert speed.execution.document_attention == expected[0]


def test_a_kernel_that_fails_in_packed_documents_gives_way_and_says_so():
    speed = fine_tuned(HOPPER, using=probes(documents=lambda *a, **k: "fa4 failed"))
    assert used(speed, "document_attention") == ("flash", "fa4 failed")


# --- packed samples ---------------------------------------------------------------------------------------------------


def resolve_chat(device: Device, *words: str, tokens: float = 1000.0, written: bool = False) -> Speed:
    """A model of the shape of TinyLlama on samples that make `tokens` in a step."""
    config = load_config("lora", ["chat.source=rows.json", *words]).config
    shape = {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "mlp_width": 5632}
    config = config.model_copy(update={"model": config.model.model_copy(update=shape)})
    names = {word.partition("=")[0] for word in words}
    return resolve_speed(
        config,
        device,
        None,
        lambda path: MINE if written and path in names else DEFAULT,
        vocab=32000,
        step_tokens=tokens,
        probes=probes(),
    )


def test_graphs_are_automatic_for_small_steps_of_samples():
    small, large = resolve_chat(HOPPER), resolve_chat(HOPPER, tokens=16000.0)
    assert small.cuda_graphs
    assert "longer than running" in feature(small, "cuda_graphs").why
    assert not large.cuda_graphs
    assert resolve_chat(HOPPER, "speed.cuda_graphs=on", tokens=16000.0).cuda_graphs
    assert not resolve_chat(HOPPER, "speed.cuda_graphs=off").cuda_graphs
    assert resolve_chat(HOPPER, "speed.micro_batch=1", tokens=16000.0).cuda_graphs, "a micro-batch is one row of 2048"
    assert used(resolve_chat(CPU), "cuda_graphs") == ("off", "")
    mixed = ["chat.batch_samples=32", "speed.attention=cudnn"]
    assert resolve_chat(HOPPER, *mixed, tokens=7700.0).cuda_graphs
    assert not resolve_chat(HOPPER, *mixed, "lora.rank=0", tokens=7700.0).cuda_graphs, "all weights get gradients"


def test_dropout_on_adapters_cannot_be_recorded():
    assert "dropout" in feature(resolve_chat(HOPPER, "lora.dropout=0.1"), "cuda_graphs").why
    with pytest.raises(HardwareError, match="dropout"):
        resolve_chat(HOPPER, "lora.dropout=0.1", "speed.cuda_graphs=on", written=True)


def test_samples_are_compiled_when_asked():
    assert used(resolve_chat(HOPPER, "speed.kernels=torch"), "compile")[0] == "off"
    assert used(resolve_chat(HOPPER, "speed.kernels=torch", "speed.compile=regional"), "compile") == ("regional", "")
    assert resolve_chat(CPU, "speed.compile=default").compile == "default"
    for mode in ("reduce-overhead", "max-autotune"):
        how, why = used(resolve_chat(HOPPER, "speed.kernels=torch", f"speed.compile={mode}"), "compile")
        assert how == "default"
        assert "samples make several" in why


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, and an environment that says nothing of threads."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(switches, "whole_cores", lambda: 4)
    monkeypatch.setattr(switches, "usable_cores", lambda: 4.0)


def threads_of(*words: str, using: Probes | None = None, **known) -> tuple[str, str]:
    config = load_config("shakespeare-char", ["speed.device=cpu", *words]).config
    return used(resolve_speed(config, CPU, 10**6, lambda _: DEFAULT, probes=using or probes(), **known), "threads")


@pytest.mark.usefixtures("quiet_cores")
def test_threads_are_tried_on_a_cpu():
    assert threads_of() == ("4", "the fastest of 1, 2, 4 in a trial")
    busy = probes(threads=lambda *shape: ThreadTrial(seconds={1: 1.0, 2: 0.6, 4: 0.5}, cores=4, others=2.2))
    assert threads_of(using=busy) == ("2", "others use 2.2 of 4 cores; speed.threads=4 takes all of them")
    assert threads_of("speed.threads=3") == ("3", "")
    assert threads_of("train.deterministic=true")[0] == "4"
    assert used(resolve(HOPPER), "threads") == (str(torch.get_num_threads()), "")


@pytest.mark.usefixtures("quiet_cores")
def test_a_resumed_run_keeps_its_threads_where_there_are_cores_for_them():
    assert threads_of(threads_before=3) == ("3", "as before the resume; speed.threads=4 takes all cores")
    assert threads_of(threads_before=16)[0] == "4"
    assert threads_of("speed.threads=2", threads_before=3)[0] == "2"
    assert threads_of(threads_before=2, ranks=2, ranks_here=2) == ("2", "as before the resume")
    assert threads_of(threads_before=4, ranks=2, ranks_here=2) == ("2", "4 cores for 2 ranks")


@pytest.mark.usefixtures("quiet_cores")
def test_ranks_of_a_host_share_its_cores():
    assert threads_of(ranks=4, ranks_here=2) == ("2", "4 cores for 2 ranks")
    assert threads_of(ranks=8, ranks_here=8)[0] == "1"


def test_the_environments_number_of_threads_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_of(threads_before=3) == (str(torch.get_num_threads()), "OMP_NUM_THREADS=1 is set")
