"""PyTorch's FSDP2 on the model of the speed tables: the peer of even data parallelism.

    torchrun --nproc-per-node 4 experiments/peers/torch_fsdp.py \
        --microbatch 4 --microbatches 16 --remat full

    torchrun --nproc-per-node 2 experiments/peers/torch_fsdp.py \
        --sequences 128 --sweep none:4 none:8 half:8 full:8 full:16

bfloat16 compute, float32 state and sums, fused AdamW, compiled blocks, sequences of
2048 random tokens. Gradients are reduced in a step's last microbatch alone. Prints one
line with ``tokens_per_s=``, the median of ``--steps``. Needs PyTorch; no JAX.

``--sweep`` tries checkpointing and microbatch on a short step each, then measures the
fastest, and the fastest under full checkpointing, on whole steps of ``--sequences`` a
card: a line each. ``half`` checkpoints every second block.
"""

import argparse
import dataclasses
import gc
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
    "small": Sizes(
        depth=2, width=64, ff_width=128, head_dim=16, vocab_size=256, length=32
    ),
}
"""``small``, to see that it works, runs without a card, too."""

REMATS = {"none": 0, "half": 2, "full": 1}
"""Of so many blocks one is checkpointed."""

TRY_SEQUENCES = 32
"""Of a card, in the step by which a sweep chooses."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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

    def __init__(self, sizes: Sizes, remat: str):
        super().__init__()
        self.sizes, self.every = sizes, REMATS[remat]
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
        for i, block in enumerate(self.blocks):
            if self.every and i % self.every == 0:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def sharded(sizes: Sizes, remat: str) -> Llama:
    """The model over all ranks, with random weights."""
    with torch.device("meta"):
        model = Llama(sizes, remat)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device=DEVICE)
    for parameter in model.parameters():
        mine = parameter.to_local().detach()
        if mine.ndim > 1:
            mine.normal_(std=0.02)
        else:
            mine.fill_(1.0)
    for block in model.blocks:
        block.compile()
    return model


def synchronize() -> None:
    """All ranks, and what they have dispatched."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def run(
    sizes: Sizes, remat: str, microbatch: int, microbatches: int, steps: int
) -> dict[str, float]:
    """Median, least and most seconds of a step of all ranks, after one of a single
    microbatch that compiles; the fullest rank's peak."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = sharded(sizes, remat)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, weight_decay=0.01, fused=True
    )
    shape = (microbatch, sizes.length + 1)
    times = []
    for step in range(steps + 1):
        count = microbatches if step else min(2, microbatches)
        synchronize()
        began = time.perf_counter()
        for i in range(count):
            model.set_requires_gradient_sync(i == count - 1)
            tokens = torch.randint(sizes.vocab_size, shape, device=DEVICE)
            (model(tokens) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        if step:
            times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    fullest = torch.tensor([float(peak)], device=DEVICE)
    dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
    samples = microbatch * microbatches * dist.get_world_size()
    step_s = statistics.median(times)
    return {
        "tokens_per_s": samples * sizes.length / step_s,
        "step_s": step_s,
        "least_s": min(times),
        "most_s": max(times),
        "peak_gib": fullest.item() / 2**30,
    }


def forget() -> None:
    """Frees what a run left."""
    gc.collect()
    torch._dynamo.reset()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def say(what: str, found: dict[str, float]) -> None:
    """A line, by the first rank."""
    if dist.get_rank() == 0:
        print(
            f"{what} tokens_per_s={found['tokens_per_s']:.0f} "
            f"step_s={found['step_s']:.4f} least_s={found['least_s']:.4f} "
            f"most_s={found['most_s']:.4f} peak_gib={found['peak_gib']:.2f} "
            f"torch={torch.__version__}",
            flush=True,
        )


def sweep(
    sizes: Sizes, cells: list[tuple[str, int]], sequences: int, steps: int
) -> None:
    """Tries remat and microbatch, then measures the fastest of all and of full."""
    rates: dict[tuple[str, int], float] = {}
    for remat, size in cells:
        what = f"try remat={remat} microbatch={size}"
        try:
            found = run(sizes, remat, size, max(1, TRY_SEQUENCES // size), 1)
        except torch.OutOfMemoryError:  # of all ranks: they are alike
            if dist.get_rank() == 0:
                print(f"{what} out of memory", flush=True)
        else:
            rates[remat, size] = found["tokens_per_s"]
            say(what, found)
        forget()
    # The ranks' clocks differ: the first one's choice is everybody's.
    chosen = [max(rates, key=rates.__getitem__)]
    full = [cell for cell in rates if cell[0] == "full"]
    if full:
        chosen.append(max(full, key=rates.__getitem__))
    dist.broadcast_object_list(chosen, src=0)
    for remat, size in dict.fromkeys(chosen):
        found = run(sizes, remat, size, sequences // size, steps)
        say(f"whole remat={remat} microbatch={size}", found)
        forget()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="1.35B")
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--remat", choices=REMATS, default="full")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sweep", nargs="+", metavar="REMAT:MICROBATCH")
    parser.add_argument("--sequences", type=int, default=64, help="of a card; --sweep")
    parser.add_argument(
        "--gate", help="a file that is waited for before cards are used"
    )
    args = parser.parse_args()
    while args.gate and not os.path.exists(args.gate):
        time.sleep(0.05)
    rank = int(os.environ["LOCAL_RANK"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    torch.manual_seed(rank)
    sizes = MODELS[args.model]
    if args.sweep:
        words = [cell.split(":") for cell in args.sweep]
        cells = [(remat, int(size)) for remat, size in words]
        sweep(sizes, cells, args.sequences, args.steps)
    else:
        counts = (args.microbatch, args.microbatches)
        say("whole", run(sizes, args.remat, *counts, args.steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
