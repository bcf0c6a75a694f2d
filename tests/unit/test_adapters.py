"""Adapters on a model: what is chosen, what is trained, one flat tensor, and off again without a trace."""

import pytest
import torch

from flatout.config.schema import ModelConfig
from flatout.errors import ConfigError
from flatout.model.adapted import AdaptedLinear, unsupported
from flatout.model.adapter_targets import AdapterPlan, choose, needless_rank, targets_of
from flatout.model.adapters import ALIGNED, Adapters, attach
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model

VOCAB = 61


def model(**settings) -> GPT:
    return build_model(
        ModelConfig(**{"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 16, **settings}), VOCAB
    )


def tokens(rows=2) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, 16), generator=torch.Generator().manual_seed(3))


def loss(gpt: GPT) -> torch.Tensor:
    return gpt(tokens(), tokens().roll(-1, dims=1)) / 32


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def shake(adapters: Adapters, seed=0, size=0.05) -> None:
    adapters.flat.add_(size * torch.randn(adapters.flat.shape, generator=torch.Generator().manual_seed(seed)))


def tiny_llama_without_memory() -> GPT:
    config = ModelConfig(
        layers=22, width=2048, heads=32, kv_heads=4, mlp_width=5632, context=2048, qk_norm=False, tied=False
    )
    with torch.device("meta"):
        return GPT(config, 32000, Execution())


# --- counting and choosing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "count"), [(8, 6_307_840), (16, 12_615_680), (64, 50_462_720)])
def test_tiny_llamas_counts(rank, count):
    adapters = attach(tiny_llama_without_memory(), AdapterPlan(rank=rank), seed=0)
    assert adapters.count == count
    assert adapters.flat.numel() == count, "sizes that fit need no padding"
    frozen = [parameter for parameter in adapters.model.parameters() if not parameter.requires_grad]
    assert sum(parameter.numel() for parameter in frozen) == 1_100_048_384
    assert len(adapters.choices) == 7 * 22


def test_dora_adds_one_number_per_row():
    plan = AdapterPlan(rank=16, dora=True)
    rows = 2048 + 256 + 256 + 2048 + 2 * 5632 + 2048
    assert attach(tiny_llama_without_memory(), plan, seed=0).count == 12_615_680 + 22 * rows


def paths(plan: AdapterPlan, gpt: GPT | None = None) -> list[str]:
    return [choice.target.path for choice in choose(plan, targets_of(gpt or model()))]


def test_targets_by_name():
    assert len(paths(AdapterPlan())) == 14
    assert paths(AdapterPlan(targets=("1.self_attn.v_proj",))) == ["model.layers.1.self_attn.v_proj"]
    assert paths(AdapterPlan(targets=("model.layers.0.mlp.up_proj",))) == ["model.layers.0.mlp.up_proj"]


def test_an_mlp_without_a_gate_and_gpt2_have_other_names():
    assert not any("gate" in path for path in paths(AdapterPlan(), model(mlp="relu2")))
    gpt2 = model(family="gpt2", kv_heads=None)
    assert paths(AdapterPlan(), gpt2)[:4] == [
        f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert len(paths(AdapterPlan(targets=("c_proj",)), gpt2)) == 4
    assert len(paths(AdapterPlan(targets=("attn.c_proj",)), gpt2)) == 2


def test_ranks_and_scales_by_name():
    ranks, alphas = (("q_proj", 2), ("layers.1.self_attn.q_proj", 9)), (("mlp.down_proj", 2), ("down_proj", 16))
    plan = AdapterPlan(rank=4, alpha=8, ranks=ranks, alphas=alphas)  # the first that fits counts
    choices = {c.target.path: c for c in choose(plan, targets_of(model()))}
    assert (choices["model.layers.1.self_attn.q_proj"].rank, choices["model.layers.1.self_attn.q_proj"].scale) == (2, 4)
    assert choices["model.layers.0.mlp.down_proj"].scale == 0.5
    assert choices["model.layers.0.self_attn.o_proj"].scale == 2
    stable = AdapterPlan(rank=9, alpha=6, rank_stabilised=True)
    assert choose(stable, targets_of(model()))[0].scale == 2


def test_ranks_beyond_a_matrix_are_told():
    targets = targets_of(model())
    least = min(min(target.rows, target.inputs) for target in targets)
    assert not needless_rank(choose(AdapterPlan(rank=least), targets))
    (told,) = needless_rank(choose(AdapterPlan(rank=least + 1), targets))
    assert f"({least})" in told


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": True}, "rank is True"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"ranks": (("q_proj", 0),)}, "the rank of 'q_proj' is 0"),
        ({"alpha": 0}, "alpha is 0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alphas": (("q_proj", -1),)}, "the alpha of 'q_proj' is -1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"targets": ()}, "at least one target"),
        ({"targets": ("([",)}, "no projection (["),
        ({"ranks": tuple((f"q{number}", 1) for number in range(3000))}, "more than 2,000"),
        ({"targets": ("q_prj",)}, "did you mean q_proj"),
        ({"targets": ("c_attn",)}, "no projection c_attn"),
        ({"ranks": (("q_poj", 3),)}, "no projection q_poj"),
        ({"alphas": (("c_attn", 3),)}, "no projection c_attn"),
        ({"targets": ("q_proj", "lm_head")}, "lm_head cannot have an adapter"),
        ({"targets": ("embed_tokens",)}, "embed_tokens cannot have an adapter"),
        ({"targets": ("q_proj",), "ranks": (("k_proj", 3),)}, "no projection k_proj"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(settings, says):
    gpt = model()
    with pytest.raises(ConfigError) as caught:
        attach(gpt, AdapterPlan(**settings), seed=0)
    assert says in str(caught.value)
    assert caught.value.hint
    assert all(parameter.requires_grad for parameter in gpt.parameters()), "nothing was touched"


# --- on and off -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", [{}, {"family": "gpt2", "kv_heads": None}, {"bias": True, "mlp": "gelu"}], ids=str)
def test_the_first_pass_is_the_bases_and_detaching_leaves_no_trace(family, dora):
    gpt = model(**family)
    names, base = [name for name, _ in gpt.named_parameters()], gpt.logits(tokens())
    weight = gpt.blocks[0].attention.qkv.weight
    adapters = attach(gpt, AdapterPlan(rank=3, dora=dora), seed=0)
    assert torch.equal(gpt.logits(tokens()), base)
    trained = [name for name, parameter in gpt.named_parameters() if parameter.requires_grad]
    assert sorted(trained) == sorted(name for name, _ in adapters.named_parameters())
    assert all("lora_" in name or "magnitude" in name for name in trained)
    assert isinstance(gpt.blocks[0].attention.qkv, AdaptedLinear)
    assert gpt.blocks[0].attention.qkv.weight is weight
    shake(adapters)
    assert not torch.allclose(gpt.logits(tokens()), base)
    loss(gpt).backward()
    assert weight.grad is None
    for layer in adapters.layers.values():
        layer.join(torch.float32)
    adapters.detach()
    assert [name for name, _ in gpt.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in gpt.parameters())
    assert torch.equal(gpt.logits(tokens()), base)
    assert weight.is_contiguous()


def test_a_is_drawn_per_target_whatever_else_is_chosen():
    everything = {t.choice.target.path: t.a for t in attach(model(), AdapterPlan(rank=4), seed=7).tensors()}
    some = attach(model(), AdapterPlan(rank=4, targets=("v_proj", "down_proj")), seed=7)
    state = torch.get_rng_state()
    for part in some.tensors():
        assert torch.equal(part.a, everything[part.choice.target.path])
    other = attach(model(), AdapterPlan(rank=4), seed=8)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are drawn"
    seen = [part.a for part in other.tensors()]
    assert not any(torch.equal(a, everything[p.choice.target.path]) for a, p in zip(seen, other.tensors(), strict=True))
    wide = everything["model.layers.0.mlp.down_proj"]
    bound = wide.shape[1] ** -0.5
    assert 0.9 * bound < wide.abs().max() <= bound
    assert len({float(a.sum()) for a in everything.values()}) == len(everything)


def test_adapters_cannot_be_put_on_twice_and_kernels_that_skip_them_are_refused():
    gpt = model()
    assert unsupported(Execution()) is None
    assert unsupported(Execution(kernels="triton")) is None
    assert "8-bit" in str(unsupported(Execution(kernels="triton", fp8=("up",))))
    attach(gpt, AdapterPlan(rank=2), seed=0)
    with pytest.raises(RuntimeError, match="already"):
        attach(gpt, AdapterPlan(rank=2), seed=0)
    with pytest.raises(ConfigError, match=r"kernels=triton: .* 8-bit"):
        gpt.use(Execution(kernels="triton", fp8=("up",)))
    for plan, reason in [(AdapterPlan(rank=2, dora=True), "DoRA"), (AdapterPlan(rank=2, dropout=0.1), "dropout")]:
        other = build_model(gpt.config, VOCAB, execution=Execution(kernels="triton"))
        with pytest.raises(ConfigError, match=f"kernels=triton: .* {reason}"):
            attach(other, plan, seed=0)
        attached = build_model(gpt.config, VOCAB)
        attach(attached, plan, seed=0)
        with pytest.raises(ConfigError, match=f"kernels=triton: .* {reason}"):
            attached.use(Execution(kernels="triton"))


# --- one flat tensor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_all_adapters_are_views_of_one_tensor_and_so_are_their_gradients(dora):
    gpt = model()
    adapters = attach(gpt, AdapterPlan(rank=3, dora=dora), seed=0)  # odd sizes, so that there is padding
    storage = adapters.flat.untyped_storage().data_ptr()
    for name, parameter in adapters.named_parameters():
        assert parameter.untyped_storage().data_ptr() == storage, name
        assert parameter.data_ptr() % (4 * ALIGNED) == adapters.flat.data_ptr() % (4 * ALIGNED), name
    assert adapters.flat.numel() > adapters.count
    gradient = adapters.flat.grad
    assert gradient is not None
    loss(gpt).backward()
    once = gradient.clone()
    loss(gpt).backward()
    torch.testing.assert_close(gradient, 2 * once)
    total = sum(float(gradient_of(p).double().square().sum()) for p in adapters.parameters())
    assert float(gradient.double().square().sum()) == pytest.approx(total), "the padding has no gradient"
    adapters.zero_gradients()
    assert gradient.abs().max() == 0
    gpt.zero_grad(set_to_none=True)
    adapters.flat.grad = None
    adapters.zero_gradients()
    loss(gpt).backward()
    torch.testing.assert_close(adapters.flat.grad, once)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_one_optimizer_on_the_flat_tensor_is_one_per_tensor(dora, fused):
    """Also with torch's fused AdamW, which changes values behind the back of everyone who counts versions."""
    losses = []
    for flat in (False, True):
        gpt = model()
        adapters = attach(gpt, AdapterPlan(rank=3, dora=dora), seed=0)
        if flat:
            optimizer = torch.optim.AdamW(adapters.optimizer_parameters, lr=1e-2, fused=fused)
            assert len(adapters.optimizer_parameters) == 1 + dora
        else:
            optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2, foreach=False)
        seen = []
        for _ in range(6):
            gpt.train()
            value = loss(gpt)
            value.backward()
            torch.nn.utils.clip_grad_norm_(adapters.optimizer_parameters if flat else adapters.parameters(), 0.5)
            optimizer.step()
            adapters.zero_gradients()
            seen.append(value.item())
        seen.append(loss(gpt.eval()).item())
        losses.append(seen)
        assert seen[-1] < seen[0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


def test_magnitudes_lie_apart_because_weight_decay_is_for_matrices():
    adapters = attach(model(), AdapterPlan(rank=3, dora=True), seed=0)
    matrices, vectors = adapters.optimizer_parameters
    assert matrices.numel() + vectors.numel() == adapters.flat.numel()
    with torch.no_grad():
        vectors.fill_(7.0)
    for name, parameter in adapters.named_parameters():
        assert (parameter == 7.0).all() == ("magnitude" in name), name


def test_after_a_move_they_are_gathered_again():
    """A change of type is as good as a change of device, and needs no device."""
    gpt = model()
    adapters = attach(gpt, AdapterPlan(rank=3), seed=0)
    shake(adapters)
    flat, before = adapters.flat, gpt.logits(tokens())
    adapters.gather()
    assert adapters.flat is flat, "nothing to do"
    gpt.double()
    adapters.gather()
    assert adapters.flat is not flat
    assert adapters.flat.dtype == torch.float32
    gpt.float()
    adapters.gather()
    torch.testing.assert_close(gpt.logits(tokens()), before)
    loss(gpt).backward()
    assert gradient_of(adapters.flat).abs().max() > 0


# --- joined weights ---------------------------------------------------------------------------------------------------


def test_joining_keeps_one_copy_of_the_weights_and_follows_updates():
    gpt = model()
    adapters = attach(gpt, AdapterPlan(rank=4), seed=0)
    shake(adapters)
    plain = gpt.logits(tokens())
    layer = adapters.layers[0, "qkv"]
    assert layer.join(torch.float32)
    assert not layer.join(torch.float32), "it is there already"
    assert layer.joined is not None
    assert layer.weight.data_ptr() == layer.joined.buffer.data_ptr()
    assert gpt.narrow.blocks[0]["qkv"].weight.data_ptr() == layer.weight.data_ptr(), "others see the same weight"
    torch.testing.assert_close(gpt.logits(tokens()), plain)
    layer.fresh()
    before = layer.joined.buffer.clone()
    shake(adapters, seed=1)  # counted by the version
    layer.fresh()
    assert not torch.equal(layer.joined.buffer, before)
    after = gpt.logits(tokens())
    adapters.unfold()
    torch.testing.assert_close(gpt.logits(tokens()), after)
    assert not torch.allclose(after, plain)


def test_joining_in_a_narrower_type_leaves_the_weights_alone():
    gpt = model()
    layer = attach(gpt, AdapterPlan(rank=4), seed=0).layers[0, "qkv"]
    assert layer.join(torch.bfloat16)
    assert layer.joined is not None
    assert layer.joined.buffer.dtype == torch.bfloat16
    assert gpt.blocks[0].attention.qkv.weight.dtype == torch.float32


# --- with the rest of the model ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_bf16_base_with_fp32_adapters(dora):
    gpt = model(qk_norm=False).to(torch.bfloat16)
    base = gpt.logits(tokens())
    adapters = attach(gpt, AdapterPlan(rank=4, dora=dora), seed=0)
    assert {p.dtype for p in adapters.parameters()} == {torch.float32}
    assert torch.equal(gpt.logits(tokens()), base)
    loss(gpt).backward()
    assert torch.isfinite(adapters.flat.grad).all()
    assert gradient_of(adapters.flat).abs().max() > 0


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_dropout_comes_again_when_a_block_is_recomputed(checkpointing):
    gradients = []
    for how in ("none", checkpointing):
        gpt = model()
        adapters = attach(gpt, AdapterPlan(rank=4, dropout=0.5), seed=0)
        shake(adapters)
        gpt.use(Execution(checkpointing=how))
        gpt.train()
        torch.manual_seed(1)
        loss(gpt).backward()
        gradients.append(gradient_of(adapters.flat).clone())
        adapters.detach()
        assert not gpt.random
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_decoding_with_a_cache_sees_the_adapter(dora):
    gpt = model().eval()
    adapters = attach(gpt, AdapterPlan(rank=4, dora=dora), seed=0)
    shake(adapters)
    whole = gpt.logits(tokens(1))
    adapters.forget()
    with torch.inference_mode():
        cache = gpt.empty_cache()
        pieces = [gpt.logits(tokens(1)[:, i : i + 1], cache) for i in range(16)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)
    for again in (False, True):  # what inference mode made is not in the way, kept or not
        adapters.zero_gradients()
        if again:
            gpt.train()
        loss(gpt).backward()
        assert torch.isfinite(adapters.flat.grad).all()
        assert gradient_of(adapters.flat).abs().max() > 0


def test_a_model_with_adapters_can_be_compiled():
    gpt = model(layers=1)
    adapters = attach(gpt, AdapterPlan(rank=4), seed=0)
    shake(adapters)
    gpt.train()
    loss(gpt).backward()
    expected = gradient_of(adapters.flat).clone()
    adapters.zero_gradients()
    compiled = torch.compile(gpt, backend="aot_eager", fullgraph=True)
    (compiled(tokens(), tokens().roll(-1, dims=1)) / 32).backward()
    torch.testing.assert_close(adapters.flat.grad, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", [{}, {"bias": True, "mlp": "gelu"}], ids=str)
def test_on_a_gpu(family, dora):
    """Attached on the CPU and moved, as a run may do: the first pass is the base's, and one fused AdamW trains all."""
    gpt = model(width=64, mlp_width=192, qk_norm=False, **family).to(torch.bfloat16)
    x = tokens().cuda()
    adapters = attach(gpt, AdapterPlan(rank=8, dora=dora), seed=0)
    gpt.cuda()
    adapters.gather()
    assert adapters.flat.is_cuda
    adapters.detach()
    base = gpt.logits(x)
    adapters = attach(gpt, AdapterPlan(rank=8, dora=dora), seed=0)
    assert torch.equal(gpt.logits(x), base)
    optimizer = torch.optim.AdamW(adapters.optimizer_parameters, lr=1e-2, fused=True)
    losses = []
    for _ in range(20):
        gpt.train()
        value = gpt(x, x.roll(-1, dims=1)) / x.numel()
        value.backward()
        optimizer.step()
        adapters.zero_gradients()
        losses.append(value.item())
    assert losses[-1] < 0.9 * losses[0]
