"""PyTorch's FSDP2 on the model of the speed tables: the peer of even data parallelism.

    torchrun --nproc-per-node 4 experiments/peers/torch_fsdp.py \
        --microbatch 4 --microbatches 16 --remat full

bfloat16 compute, float32 state and sums, fused AdamW, compiled blocks, sequences of
2048 random tokens. Gradients are reduced in a step's last microbatch alone. Prints one
line with ``tokens_per_s=``, the median of ``--steps``. Needs PyTorch; no JAX.
"""

import argparse
import dataclasses
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model."""

    depth: int = 24
    width: int = 2048
    ff_width: int = 5504
    head_dim: int = 128
    vocab_size: int = 32_000
    length: int = 2048


MODELS = {
    "1.35B": Sizes(),
    "2.7B": Sizes(depth=12, width=4096, ff_width=11_008),
}


class Attention(nn.Module):
    """Causal, with rotated queries and keys."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x, cos, sin):
        def heads(y):
            return y.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)

        def turned(y):
            low, high = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-high, low), dim=-1) * sin

        query, key = turned(heads(self.query(x))), turned(heads(self.key(x)))
        value = heads(self.value(x))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of Llama."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, ff_width = sizes.width, sizes.ff_width
        self.before_attention, self.before_ff = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(sizes)
        self.gate, self.up = (nn.Linear(width, ff_width, bias=False) for _ in range(2))
        self.down = nn.Linear(ff_width, width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.before_attention(x), cos, sin)
        y = self.before_ff(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Gives the mean loss of a microbatch."""

    def __init__(self, sizes: Sizes, remat: bool):
        super().__init__()
        self.sizes, self.remat = sizes, remat
        self.embed = nn.Embedding(sizes.vocab_size, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab_size, bias=False)

    def forward(self, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs)
        half = self.sizes.head_dim // 2
        powers = torch.arange(half, device=x.device) / half
        at = torch.arange(inputs.shape[1], device=x.device)
        angle = at[:, None] / 10_000**powers
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            if self.remat:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def sharded(sizes: Sizes, remat: bool) -> Llama:
    """The model over all ranks, with random weights."""
    with torch.device("meta"):
        model = Llama(sizes, remat)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        mine = parameter.to_local().detach()
        if mine.ndim > 1:
            mine.normal_(std=0.02)
        else:
            mine.fill_(1.0)
    for block in model.blocks:
        block.compile()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="1.35B")
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--remat", choices=["full", "none"], default="full")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(rank)
    sizes = MODELS[args.model]
    model = sharded(sizes, args.remat == "full")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, weight_decay=0.01, fused=True
    )
    shape = (args.microbatch, sizes.length + 1)
    times = []
    for step in range(args.steps + 1):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(args.microbatches):
            model.set_requires_gradient_sync(i == args.microbatches - 1)
            tokens = torch.randint(sizes.vocab_size, shape, device="cuda")
            (model(tokens) / args.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        dist.barrier()
        if step:  # the first compiles
            times.append(time.perf_counter() - began)
    cards = dist.get_world_size()
    step_s = statistics.median(times)
    samples = args.microbatch * args.microbatches * cards
    peak = torch.tensor([torch.cuda.max_memory_allocated()], device="cuda")
    peaks = [torch.zeros_like(peak) for _ in range(cards)]
    dist.all_gather(peaks, peak)
    if rank == 0:
        print(
            f"tokens_per_s={samples * sizes.length / step_s:.0f} step_s={step_s:.4f} "
            f"least_s={min(times):.4f} most_s={max(times):.4f} "
            f"peak_gib={max(int(p) for p in peaks) / 2**30:.2f} "
            f"torch={torch.__version__}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
