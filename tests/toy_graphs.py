"""Hand-built model graphs, small enough to reason about and free of torch: what planner tests plan with."""

from __future__ import annotations

from autoparallel.costmodel.graph import (
    Block,
    Instance,
    KernelSpec,
    ModelGraph,
    Operator,
    OpKind,
    Parameter,
    Saved,
    Sharding,
    Size,
    TensorSpec,
)

DTYPE = "bfloat16"
REPLICATED_1 = Sharding(inputs=("R",), outputs=("R",))


def spec(*shape: int, dtype: str = DTYPE, batch: bool = True) -> TensorSpec:
    """A tensor of `shape` per sample, the batch dim first."""
    sizes = tuple(Size(n, 0) for n in shape)
    return TensorSpec(shape=(Size(0, 1), *sizes) if batch else sizes, dtype=dtype)


def _per_sample(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def memory_op(
    name: str, module: str, inputs: tuple[str, ...], shape: tuple[int, ...], *, kind: OpKind = OpKind.ELEMENTWISE,
    saved: tuple[str, ...] = (), shardings: tuple[Sharding, ...] = (), params: int = 0,
) -> Operator:  # fmt: skip
    """An operator that only moves bytes: every activation input and the output has `shape`."""
    n = _per_sample(shape)
    tensors = len(inputs) - params
    bytes_moved = Size(0, n * 2 * (tensors + 1))
    kernel = KernelSpec(kind=kind, dtype=DTYPE, flops=Size(0, 0), bytes_moved=bytes_moved)
    back = KernelSpec(kind=kind, dtype=DTYPE, flops=Size(0, 0), bytes_moved=bytes_moved, gradient_of="input")
    return Operator(
        name=name, target=f"toy.{name}", kind=kind, module=module, inputs=inputs, outputs=(spec(*shape),),
        forward=(kernel,), backward=(back,), saved=tuple(Saved(value=v, spec=spec(*shape)) for v in saved),
        shardings=shardings,
    )  # fmt: skip


def linear(name: str, module: str, source: str, seq: int, fan_in: int, fan_out: int) -> Operator:
    """y[b,s,n] = x[b,s,k] W[n,k]: column, row and sequence shardings, as DTensor has them."""
    flops = Size(0, 2 * seq * fan_in * fan_out)

    def kernel(product: str, gradient_of: str = "") -> KernelSpec:
        moved = Size(2 * fan_in * fan_out, 2 * seq * (fan_in + fan_out))
        return KernelSpec(
            kind=OpKind.GEMM, dtype=DTYPE, flops=flops, bytes_moved=moved, product=product,
            gradient_of=gradient_of,
        )  # fmt: skip

    return Operator(
        name=name, target="aten.linear.default", kind=OpKind.GEMM, module=module,
        inputs=(source, f"param:{module}.weight"), outputs=(spec(seq, fan_out),),
        forward=(kernel("bmnk"),), backward=(kernel("bmkn", "input"), kernel("bnkm", "weight")),
        saved=(Saved(value=source, spec=spec(seq, fan_in)),),
        shardings=(
            Sharding(inputs=("R", "R"), outputs=("R",)),
            Sharding(inputs=("R", "S0"), outputs=("S2",), divides=(Size(fan_out, 0),)),
            Sharding(inputs=("S2", "S1"), outputs=("P",), divides=(Size(fan_in, 0),)),
            Sharding(inputs=("S1", "R"), outputs=("S1",), divides=(Size(seq, 0),)),
        ),
        labels=("mmk", "nk", "mmn"),
        sizes=(("m", Size(0, seq)), ("n", Size(fan_out, 0)), ("k", Size(fan_in, 0)), ("b", Size(1, 0))),
    )  # fmt: skip


def attention(name: str, sources: tuple[str, str, str], seq: int, heads: int, head_size: int) -> Operator:
    """Causal self-attention over values of shape (b, s, heads * head_size), heads shardable."""
    hidden = heads * head_size
    flops = 4 * seq * seq * hidden
    moved = Size(0, 2 * 4 * seq * hidden)
    sharded = Sharding(inputs=("S2", "S2", "S2"), outputs=("S2",), divides=(Size(heads, 0),))
    return Operator(
        name=name, target="aten.scaled_dot_product_attention.default", kind=OpKind.ATTENTION,
        module="attn", inputs=sources, outputs=(spec(seq, hidden),),
        forward=(KernelSpec(kind=OpKind.ATTENTION, dtype=DTYPE, flops=Size(0, flops), bytes_moved=moved),),
        backward=(
            KernelSpec(
                kind=OpKind.ATTENTION, dtype=DTYPE, flops=Size(0, 2 * flops), bytes_moved=moved * 2,
                gradient_of="input",
            ),
        ),
        saved=(
            *(Saved(value=v, spec=spec(seq, hidden)) for v in (*sources, name)),
            Saved(value="", spec=spec(heads, seq, dtype="float32")),
        ),
        shardings=(Sharding(inputs=("R", "R", "R"), outputs=("R",)), sharded),
        labels=("bsh", "bth", "bth", "bsh"),
        sizes=(
            ("b", Size(0, 1)), ("h", Size(heads, 0)), ("g", Size(heads, 0)), ("s", Size(seq, 0)),
            ("t", Size(seq, 0)), ("d", Size(head_size, 0)), ("v", Size(head_size, 0)),
        ),
        causal=True,
    )  # fmt: skip


def _same(inputs: int, dims: tuple[int, ...], seq: int, width: int) -> tuple[Sharding, ...]:
    sizes = {1: seq, 2: width}
    replicated = Sharding(inputs=("R",) * inputs, outputs=("R",))
    sharded = tuple(
        Sharding(inputs=(f"S{d}",) * inputs, outputs=(f"S{d}",), divides=(Size(sizes[d], 0),)) for d in dims
    )
    return (replicated, *sharded)


def _norm(name: str, source: str, seq: int, hidden: int) -> Operator:
    return memory_op(
        name, name, (source, f"param:{name}.weight"), (seq, hidden), kind=OpKind.NORM, saved=(source,), params=1,
        shardings=(
            Sharding(inputs=("R", "R"), outputs=("R",)),
            Sharding(inputs=("S1", "R"), outputs=("S1",), divides=(Size(seq, 0),)),
        ),
    )  # fmt: skip


def _weight(name: str, *shape: int) -> Parameter:
    return Parameter(name=name, shape=shape, dtype=DTYPE)


def transformer_block(seq: int, hidden: int, heads: int, ffn: int) -> Block:
    """norm, q/k/v, attention, o, add; norm, up, activation, down, add."""
    pointwise = (1, 2)
    operators = (
        _norm("norm1", "input:0", seq, hidden),
        *(linear(n, f"attn.{n}", "norm1", seq, hidden, hidden) for n in ("q", "k", "v")),
        attention("core", ("q", "k", "v"), seq, heads, hidden // heads),
        linear("o", "attn.o", "core", seq, hidden, hidden),
        memory_op("add1", "", ("input:0", "o"), (seq, hidden), shardings=_same(2, pointwise, seq, hidden)),
        _norm("norm2", "add1", seq, hidden),
        linear("up", "mlp.up", "norm2", seq, hidden, ffn),
        memory_op("act", "mlp", ("up",), (seq, ffn), saved=("up",), shardings=_same(1, pointwise, seq, ffn)),
        linear("down", "mlp.down", "act", seq, ffn, hidden),
        memory_op("add2", "", ("add1", "down"), (seq, hidden), shardings=_same(2, pointwise, seq, hidden)),
    )
    square = [_weight(f"attn.{n}.weight", hidden, hidden) for n in ("q", "k", "v", "o")]
    return Block(
        name=f"ToyLayer{ffn}", inputs=(spec(seq, hidden),), outputs=("add2",), operators=operators,
        parameters=(
            _weight("norm1.weight", hidden), *square, _weight("norm2.weight", hidden),
            _weight("mlp.up.weight", ffn, hidden), _weight("mlp.down.weight", hidden, ffn),
        ),
    )  # fmt: skip


def _embedding_block(seq: int, hidden: int, vocab: int, tied: str) -> Block:
    op = memory_op(
        "embedding", "embed", ("input:0", "param:embed.weight"), (seq, hidden), kind=OpKind.EMBEDDING,
        params=1, shardings=(
            Sharding(inputs=("R", "R"), outputs=("R",)),
            Sharding(inputs=("R", "S0"), outputs=("P",), divides=(Size(vocab, 0),)),
            Sharding(inputs=("R", "S1"), outputs=("S2",), divides=(Size(hidden, 0),)),
        ),
    )  # fmt: skip
    weight = Parameter(name="embed.weight", shape=(vocab, hidden), dtype=DTYPE, tied=tied)
    tokens = spec(seq, dtype="int64")
    return Block(
        name="Embedding", inputs=(tokens,), outputs=("embedding",), operators=(op,), parameters=(weight,)
    )


def _head_block(seq: int, hidden: int, vocab: int, tied: str) -> Block:
    logits = linear("head", "head", "norm", seq, hidden, vocab)
    n = seq * vocab
    loss = Operator(
        name="loss", target="aten.cross_entropy_loss.default", kind=OpKind.CROSS_ENTROPY, module="",
        inputs=("head", "input:1"), outputs=(TensorSpec(shape=(), dtype="float32"),),
        forward=(
            KernelSpec(
                kind=OpKind.CROSS_ENTROPY, dtype="float32", flops=Size(0, 5 * n), bytes_moved=Size(0, 10 * n)
            ),
        ),
        backward=(
            KernelSpec(
                kind=OpKind.CROSS_ENTROPY, dtype="float32", flops=Size(0, 3 * n), bytes_moved=Size(0, 6 * n),
                gradient_of="input",
            ),
        ),
        saved=(Saved(value="", spec=spec(seq, vocab, dtype="float32")),),
        shardings=(
            Sharding(inputs=("R", "R"), outputs=("R",)),
            Sharding(inputs=("S2", "R"), outputs=("R",), divides=(Size(vocab, 0),)),
        ),
    )  # fmt: skip
    weight = Parameter(name="head.weight", shape=(vocab, hidden), dtype=DTYPE, tied=tied)
    return Block(
        name="Head", inputs=(spec(seq, hidden), spec(seq, dtype="int64")), outputs=("loss",),
        operators=(_norm("norm", "input:0", seq, hidden), logits, loss),
        parameters=(_weight("norm.weight", hidden), weight),
    )  # fmt: skip


def toy_transformer(
    *, layers: int = 4, hidden: int = 64, heads: int = 4, seq: int = 32, vocab: int = 128, tied: bool = False,
    ffns: tuple[int, ...] = (),
) -> ModelGraph:  # fmt: skip
    """A causal language model with its loss; `ffns` gives a cycle of MLP widths (several distinct blocks)."""
    cycle = ffns or (4 * hidden,)
    distinct = tuple(dict.fromkeys(cycle))
    tie = "embed.weight" if tied else ""
    blocks = (
        _embedding_block(seq, hidden, vocab, tie),
        *(transformer_block(seq, hidden, heads, ffn) for ffn in distinct),
        _head_block(seq, hidden, vocab, tie),
    )
    sends = (spec(seq, hidden),)
    chain = (
        Instance(block=0, path="", repeated=False, sends=sends),
        *(
            Instance(
                block=1 + distinct.index(cycle[i % len(cycle)]),
                path=f"layers.{i}",
                repeated=True,
                sends=sends,
            )
            for i in range(layers)
        ),
        Instance(block=len(blocks) - 1, path="", repeated=False),
    )
    return ModelGraph(
        name="toy", dtype=DTYPE, blocks=blocks, chain=chain, tokens_per_sample=seq, has_loss=True,
        pipeline_cuts=True,
    )  # fmt: skip


def toy_encoder_decoder(*, layers: int = 4, hidden: int = 64, seq: int = 32, vocab: int = 128) -> ModelGraph:
    """Half of the layers are an encoder's, of a sequence four times as long, whose output is sent on with every message of the
    decoder; the decoder's embedding stands between the two, and the head's weight is its own."""
    long = 4 * seq
    encoder, decoder = (transformer_block(length, hidden, 4, 4 * hidden) for length in (long, seq))
    blocks = (
        _embedding_block(long, hidden, vocab, ""), encoder, _embedding_block(seq, hidden, vocab, "embed.weight"),
        decoder, _head_block(seq, hidden, vocab, "embed.weight"),
    )  # fmt: skip
    encoded, both = (spec(long, hidden),), (spec(long, hidden), spec(seq, hidden))
    half = layers // 2
    chain = (
        Instance(block=0, path="", repeated=False, sends=encoded),
        *(Instance(block=1, path=f"encoder.{i}", repeated=True, sends=encoded) for i in range(half)),
        Instance(block=2, path="", repeated=False, sends=both),
        *(
            Instance(
                block=3, path=f"decoder.{i}", repeated=True, sends=both if i < layers - half - 1 else both[1:]
            )
            for i in range(layers - half)
        ),
        Instance(block=4, path="", repeated=False),
    )
    return ModelGraph(
        name="toy", dtype=DTYPE, blocks=blocks, chain=chain, tokens_per_sample=seq, has_loss=True,
        pipeline_cuts=True,
    )  # fmt: skip


def toy_mlp(*, layers: int = 4, width: int = 64) -> ModelGraph:
    """A stack of linear layers with an activation: no sequence, no attention, no loss."""
    operators = (
        linear("fc", "fc", "input:0", 1, width, width),
        memory_op("act", "", ("fc",), (1, width), saved=("fc",), shardings=_same(1, (2,), 1, width)),
    )
    block = Block(
        name="ToyMlp", inputs=(spec(1, width),), outputs=("act",), operators=operators,
        parameters=(_weight("fc.weight", width, width),),
    )  # fmt: skip
    chain = tuple(
        Instance(block=0, path=f"layers.{i}", repeated=True, sends=(spec(1, width),)) for i in range(layers)
    )
    return ModelGraph(
        name="toy-mlp", dtype=DTYPE, blocks=(block,), chain=chain, tokens_per_sample=1, has_loss=False,
        pipeline_cuts=True,
    )  # fmt: skip
