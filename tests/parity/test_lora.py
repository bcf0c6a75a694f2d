"""Our adapters are PEFT's: the same base and adapter give the same logits, gradients, losses and files."""

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flatout.model.adapter_files import load_adapter, read_origin, save_adapter
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import Adapters, attach
from flatout.model.execution import Execution
from flatout.model.gpt import GPT
from flatout.model.merge import merge
from tests.hub_folders import from_huggingface
from tests.llama_twin import build_llama, our_twin, tokens

if TYPE_CHECKING:
    import peft
    import transformers

QV = ("q_proj", "v_proj")
# our plan, and theirs
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"rank": 4, "alpha": 8}, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "rslora": (
        {"rank": 4, "alpha": 6, "rank_stabilised": True},
        {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    ),
    "dora": (
        {"rank": 4, "alpha": 8, "dora": True},
        {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": "all-linear"},
    ),
    "dora on q and v": (
        {"rank": 3, "alpha": 8, "dora": True, "targets": QV},
        {"r": 3, "lora_alpha": 8, "use_dora": True, "target_modules": list(QV)},
    ),
    "q and v": (
        {"rank": 3, "alpha": 7, "targets": QV},
        {"r": 3, "lora_alpha": 7, "target_modules": list(QV)},
    ),
    "other ranks": (
        {
            "rank": 4,
            "alpha": 8,
            "ranks": (("layers.1.self_attn.k_proj", 2), ("up_proj", 6), ("self_attn.q_proj", 5)),
            "alphas": (("down_proj", 3),),
        },
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "rank_pattern": {"layers.1.self_attn.k_proj": 2, "up_proj": 6, "self_attn.q_proj": 5},
            "alpha_pattern": {"down_proj": 3},
        },
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _imported_late() -> None:
    """Both take seconds to import, and every process collects all tests."""
    global peft, transformers
    import peft
    import transformers


def quietly(function, *values, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*values, **options)


def peft_twin(options: dict[str, Any]) -> tuple["peft.PeftModel", GPT]:
    base = build_llama()
    ours = our_twin(base)
    return quietly(peft.get_peft_model, base, peft.LoraConfig(**options)), ours


def their_tensors(theirs: "peft.PeftModel") -> dict[str, torch.nn.Parameter]:
    """What they train, without the adapter's name."""
    found = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    return {name.replace(".default", ""): parameter for name, parameter in found.items()}


def our_tensors(adapters: Adapters, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Ours under their names; with `gradients`, the gradients instead."""
    if gradients:
        values = adapters.flat.detach().clone()
        with torch.no_grad():  # the views read the flat tensor: for a moment it holds the gradient
            adapters.flat.copy_(adapters.flat.grad)
        try:
            return {name: tensor.clone() for name, tensor in our_tensors(adapters).items()}
        finally:
            with torch.no_grad():
                adapters.flat.copy_(values)
    tensors = {}
    for part in adapters.tensors():
        path = f"base_model.model.{part.choice.target.path}"
        tensors |= {f"{path}.lora_A.weight": part.a, f"{path}.lora_B.weight": part.b}
        if part.magnitude is not None:
            tensors[f"{path}.lora_magnitude_vector.weight"] = part.magnitude
    return tensors


@torch.no_grad()
def share_values(theirs: "peft.PeftModel", adapters: Adapters, *, random: bool) -> None:
    """Gives both the same adapter; a random one, or that of the start, drawn by PEFT."""
    torch.manual_seed(5)
    mine, others = our_tensors(adapters), their_tensors(theirs)
    assert mine.keys() == others.keys()
    for name, parameter in others.items():
        if random:
            kind = 0.3 if "magnitude" in name else 0.05
            parameter.add_(kind * torch.randn_like(parameter))
        mine[name].copy_(parameter)


def loss_of(theirs: "peft.PeftModel", x: torch.Tensor) -> torch.Tensor:
    logits = theirs(x).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


def our_loss(ours: GPT, x: torch.Tensor) -> torch.Tensor:
    return ours(x[:, :-1], x[:, 1:]) / x[:, 1:].numel()


def test_the_tests_twin_is_a_twin():
    base = build_llama()
    assert (our_twin(base).logits(tokens()) - base(tokens()).logits).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_agree(kind):
    plan, options = KINDS[kind]
    theirs, ours = peft_twin(options)
    x = tokens()
    base = ours.logits(x)
    adapters = attach(ours, AdapterPlan(**plan), seed=0)
    assert torch.equal(ours.logits(x), base), "the first pass is the base's, bit for bit"
    assert adapters.count == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    share_values(theirs, adapters, random=True)
    assert (ours.logits(x) - base).abs().max() > 1e-3
    ways = [Execution(), Execution(fused_qkv=False), Execution(checkpointing="full")]
    ways.append(Execution(checkpointing="selective"))
    loss_of(theirs, x).backward()
    expected: dict[str, Any] = {name: p.grad for name, p in their_tensors(theirs).items()}
    for way in ways:
        ours.use(way)
        ours.eval()
        assert (ours.logits(x) - theirs(x).logits).abs().max() < 1e-5, way
        ours.train()
        adapters.zero_gradients()
        our_loss(ours, x).backward()
        found = our_tensors(adapters, gradients=True)
        for name, gradient in expected.items():
            relative = (found[name] - gradient).norm() / gradient.norm()
            assert relative < 1e-4, (way, name, float(relative))


def test_at_the_start_a_has_no_gradient_and_b_has_one():
    ours = our_twin(build_llama())
    adapters = attach(ours, AdapterPlan(rank=4), seed=0)
    our_loss(ours, tokens()).backward()
    for name, gradient in our_tensors(adapters, gradients=True).items():
        assert (gradient.abs().max() == 0) == ("lora_A" in name), name


@pytest.mark.parametrize("steps", [20, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "q and v", "other ranks"])
def test_steps_have_the_same_losses(kind, steps):
    """The same start, data and AdamW: theirs on every tensor, ours on the flat one."""
    plan, options = KINDS[kind]
    theirs, ours = peft_twin(options)
    adapters = attach(ours, AdapterPlan(**plan), seed=0)
    share_values(theirs, adapters, random=False)
    settings = {"lr": 1e-2, "weight_decay": 0.01}
    their_optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], **settings)
    our_optimizer = torch.optim.AdamW([adapters.flat], fused=True, **settings)
    losses = []
    for step in range(steps):
        x = tokens(step % 2, rows=2)
        ours.train()
        their_optimizer.zero_grad()
        adapters.zero_gradients()
        their_loss, our_one = loss_of(theirs, x), our_loss(ours, x)
        their_loss.backward()
        our_one.backward()
        their_optimizer.step()
        our_optimizer.step()
        losses.append((their_loss.item(), our_one.item()))
    assert losses[-1][0] < 0.97 * losses[0][0], "something was learned"
    for step, (expected, found) in enumerate(losses):
        assert abs(found - expected) < 1e-4 * expected, (step, expected, found)


@pytest.mark.parametrize("kind", KINDS)
def test_their_files_load_here(kind, tmp_path):
    _, options = KINDS[kind]
    theirs, ours = peft_twin(options)
    attached = {name: torch.randn_like(p) * 0.05 for name, p in their_tensors(theirs).items()}
    with torch.no_grad():
        for name, parameter in their_tensors(theirs).items():
            parameter.add_(attached[name])
    quietly(theirs.save_pretrained, tmp_path / "adapter")
    adapters, origin = load_adapter(ours, tmp_path / "adapter")
    x = tokens()
    assert (ours.logits(x) - theirs.eval()(x).logits).abs().max() < 1e-5
    assert adapters.plan == origin.plan


@pytest.mark.parametrize("kind", KINDS)
def test_our_files_load_there(kind, tmp_path):
    plan, _ = KINDS[kind]
    base = build_llama()
    ours = our_twin(base)
    adapters = attach(ours, AdapterPlan(**plan), seed=3)
    with torch.no_grad():
        adapters.flat.add_(0.05 * torch.randn_like(adapters.flat))
    save_adapter(adapters, tmp_path / "adapter", base="somebody/a-llama")
    theirs = quietly(peft.PeftModel.from_pretrained, base, tmp_path / "adapter")
    x = tokens()
    assert (ours.logits(x) - theirs.eval()(x).logits).abs().max() < 1e-5
    again, _ = load_adapter(our_twin(build_llama()), tmp_path / "adapter")
    assert torch.equal(again.model.logits(x), ours.logits(x)), "our own round trip changes no bit"
    quietly(theirs.save_pretrained, tmp_path / "theirs")
    assert not any((tmp_path / "theirs").glob("*.bin"))
    third, _ = load_adapter(our_twin(build_llama()), tmp_path / "theirs")
    assert torch.equal(third.model.logits(x), ours.logits(x)), "nor does one through PEFT"


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_gpt2_has_names_of_its_own(tmp_path: Path, dora):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    base = transformers.GPT2LMHeadModel(config).eval()
    base.save_pretrained(tmp_path / "base")
    ours = from_huggingface(tmp_path / "base").eval()
    options = {"target_modules": ["c_attn", "mlp.c_proj", "c_fc"], "fan_in_fan_out": True, "use_dora": dora}
    theirs = quietly(peft.get_peft_model, base, peft.LoraConfig(r=3, lora_alpha=5, **options)).eval()
    with torch.no_grad():
        for parameter in their_tensors(theirs).values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    quietly(theirs.save_pretrained, tmp_path / "adapter")
    adapters, origin = load_adapter(ours, tmp_path / "adapter")
    x = torch.randint(61, (2, 16))
    assert set(origin.plan.targets) == {"c_attn", "mlp.c_proj", "c_fc"}
    assert {c.target.linear for c in adapters.choices} == {"qkv", "up", "down"}
    assert (ours.logits(x) - theirs(x).logits).abs().max() < 1e-5
    ours.use(Execution(fused_qkv=False))  # one adapter for queries, keys and values, cut into three
    assert (ours.logits(x) - theirs(x).logits).abs().max() < 1e-5
    save_adapter(adapters, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    fresh = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base", attn_implementation="eager")
    back = quietly(peft.PeftModel.from_pretrained, fresh, tmp_path / "ours").eval()
    assert torch.equal(back(x).logits, theirs(x).logits)


@pytest.mark.parametrize("kind", ["lora", "dora", "other ranks"])
def test_a_merge_is_what_peft_merges(kind):
    plan, options = KINDS[kind]
    theirs, ours = peft_twin(options)
    adapters = attach(ours, AdapterPlan(**plan), seed=0)
    share_values(theirs, adapters, random=True)
    x = tokens()
    before = ours.logits(x)
    report = merge(adapters, torch.float32)
    assert report.kept == pytest.approx(1.0, abs=1e-5)
    merged = theirs.merge_and_unload()
    assert (ours.logits(x) - before).abs().max() < 1e-5
    assert (ours.logits(x) - merged(x).logits).abs().max() < 1e-5
    assert (ours.logits(x) - our_twin(merged).logits(x)).abs().max() < 1e-5


def test_all_linear_is_written_as_names(tmp_path):
    adapters = attach(our_twin(build_llama()), AdapterPlan(rank=2), seed=0)
    save_adapter(adapters, tmp_path / "adapter")
    names = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert read_origin(tmp_path / "adapter").plan.targets == names


def test_their_dropout_is_ours():
    """The same mask on the same input: PEFT's dropout under the same state of the generator, one matrix adapted."""
    theirs, ours = peft_twin({"r": 4, "lora_alpha": 8, "target_modules": ["layers.0.mlp.down_proj"]})
    plan = AdapterPlan(rank=4, alpha=8, dropout=0.5, targets=("layers.0.mlp.down_proj",))
    adapters = attach(ours, plan, seed=0)
    share_values(theirs, adapters, random=True)
    inner: Any = theirs.base_model
    module = inner.model.model.layers[0].mlp.down_proj
    module.lora_dropout["default"] = torch.nn.Dropout(0.5)
    x = tokens()[:, :-1]
    theirs.train()
    ours.train()
    torch.manual_seed(2)
    expected = theirs(x).logits
    torch.manual_seed(2)
    found = ours.logits(x)
    assert (found - expected).abs().max() < 1e-5
    assert (found - ours.eval().logits(x)).abs().max() > 1e-3
