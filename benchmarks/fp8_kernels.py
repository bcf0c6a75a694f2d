"""Microseconds of each kernel with and without its second output, GPT-2 124M at 65,536 tokens. Run in the repository: PYTHONPATH=src python FILE"""
import torch, triton
from flatout.ops.kernels import fp8
from flatout.ops.kernels.activation import GELU, activate, activate_backward
from flatout.ops.kernels.heads import pack_heads
from flatout.ops.kernels.norm import add_norm
from flatout.ops.scales import E4M3, Scales
N, W, M, d = 65536, 768, 3072, torch.device("cuda")
t = Scales([E4M3] * 2, d); t._set(torch.full((2,), 64.0, device=d)); t.rounding = t.recording = True
s, s2 = t.slots
r = lambda *k: torch.randn(*k, device=d, dtype=torch.bfloat16)
x, b, pre, g = r(N, W).requires_grad_(), r(N, W).requires_grad_(), r(N, M), r(N, M)
w, bias, wide = torch.randn(W, device=d).requires_grad_(), torch.randn(W, device=d).requires_grad_(), torch.randn(M, device=d)
parts = [r(64, 12, 1024, 64) for _ in range(3)]
def norm(a, c): return add_norm(x, b, bias, w, bias, centred=True, eps=1e-5, dtype=torch.bfloat16, slot=a, branch_slot=c)
dx, dh = r(N, W), r(N, W)
def back(c):
    out = norm(None, c)
    return lambda: torch.autograd.grad(out, [x, b, w, bias], [dx, dh], retain_graph=True)
def show(name, *ways): print(f"{name:28s}", *(f"{1000 * triton.testing.do_bench(way, warmup=50, rep=200):8.1f}" for way in ways))
print("us                            plain  +8 bits")
show("norm forward", lambda: norm(None, None), lambda: norm(s, None))
show("norm backward", back(None), back(s))
show("gelu forward", lambda: activate(pre, wide, GELU), lambda: activate(pre, wide, GELU, s))
show("gelu backward", lambda: activate_backward(g, pre, wide, GELU, again=False), lambda: activate_backward(g, pre, wide, GELU, again=False, slot=s))
show("pack heads", lambda: pack_heads(parts, sums=True), lambda: pack_heads(parts, sums=True, slot=s))
show("one pass (attention output)", lambda: fp8.narrow_values(s, dx))
weight = torch.randn(M, W, device=d); into = fp8.quantise(weight, E4M3, turned=True)
show("weight 3072x768", lambda: fp8.quantise(weight, E4M3, into=into))
show("settle", t.settle)
