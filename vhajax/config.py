"""Frozen configuration: everything a run depends on, checked when it is built.

No JAX here, so that `vhajax -h` and every refusal answer at once. Attention, and the letters of its
dimensions, are in `mechanisms.py`.
"""

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from vhajax.errors import UserError
from vhajax.mechanisms import (
    GQA,
    LRKV,
    MECHANISMS,
    MFA,
    MLA,
    VHA,
    Attention,
    Norm,
    require,
    require_choice,
    require_not_negative,
    require_positive,
)

__all__ = [
    "GQA",
    "LONG",
    "LRKV",
    "MECHANISMS",
    "MFA",
    "MLA",
    "VHA",
    "Attention",
    "Data",
    "Experiment",
    "Hosts",
    "Mesh",
    "Model",
    "Norm",
    "Optim",
    "Train",
    "from_json",
    "to_json",
]

FORMAT_VERSION = 3


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer."""

    vocab_size: int = 4096
    """V, at least the tokenizer's; the embedding is padded to a multiple of vocab_multiple."""
    dim: int = 256
    """D."""
    num_layers: int = 4
    """L."""
    attention: Attention = field(default_factory=GQA)
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, repeated over the layers: a query sees that many tokens, itself
    included; 0: all. (1024, 1024, 0) makes every third layer global. Empty: no windows."""
    ffn: Literal["swiglu", "relu2"] = "swiglu"
    ffn_dim: int = 768
    """F."""
    norm: Literal["weighted", "weightless"] = "weighted"
    """RMSNorm before attention, before the FFN and before the logits."""
    norm_eps: float = 1e-6
    tied: bool = False
    """One matrix as embedding and unembedding."""
    vocab_multiple: int = 128
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; master weights are float32. auto: float32 on CPU, bfloat16 elsewhere."""

    def __post_init__(self) -> None:
        require_positive(
            "model",
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            ffn_dim=self.ffn_dim,
            norm_eps=self.norm_eps,
            vocab_multiple=self.vocab_multiple,
        )
        require_choice(
            "model",
            ffn=(self.ffn, ("swiglu", "relu2")),
            norm=(self.norm, ("weighted", "weightless")),
            dtype=(self.dtype, ("auto", "float32", "bfloat16")),
        )
        require(
            self.padded_vocab * self.dim < 2**31,
            f"model.vocab_size × model.dim is {self.padded_vocab * self.dim}; one weight must "
            "have fewer than 2³¹ elements.",
        )
        require(
            all(window >= 0 for window in self.windows),
            f"model.windows is {self.windows}; a window must not be negative (0 means all).",
        )

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of every layer, 0 for all; empty where no layer has one."""
        if not any(self.windows):
            return ()
        return tuple(self.windows[i % len(self.windows)] for i in range(self.num_layers))

    @property
    def padded_vocab(self) -> int:
        """V rounded up to vocab_multiple; padded ids have logit −inf."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True)
class Data:
    """Which rows are read; a prepared folder fixes its own sequence length and tokenizer."""

    path: str = ""
    """Folder that `vhajax data prepare` wrote; empty: the Python standard library's source."""
    seq_len: int = 256
    """T; a row holds T + 1 tokens."""
    batch_size: int = 16
    """B, rows of one optimizer step over all hosts."""
    seed: int = 0
    """Order of the rows: a permutation given by (seed, step) alone."""

    def __post_init__(self) -> None:
        require_positive("data", seq_len=self.seq_len, batch_size=self.batch_size)
        require(
            0 <= self.seed < 2**32, f"data.seed is {self.seed}; it must lie between 0 and 2³² − 1."
        )
        require(
            self.batch_size * self.seq_len < 2**31,
            f"data.batch_size × data.seq_len is {self.batch_size * self.seq_len}; "
            "a step must have fewer than 2³¹ tokens.",
        )


@dataclass(frozen=True)
class Optim:
    """Muon on matrices with AdamW on the rest, or AdamW on everything."""

    name: Literal["muon", "adamw"] = "muon"
    matrix_lr: float = 0.02
    """Rate of matrices inside blocks (Muon, or AdamW if name is adamw)."""
    embedding_lr: float = 0.2
    """Rate of an untied embedding (AdamW)."""
    unembedding_lr: float = 0.004
    """AdamW rate of the unembedding, of a tied embedding (which must act as one), of vectors."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-10
    momentum: float = 0.95
    """Muon's Nesterov momentum."""
    weight_decay: float = 0.1
    """Decoupled, times the scheduled rate; acts on matrices only."""
    clip_norm: float = 1.0
    """Global gradient norm; 0: no clipping."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Warm-up then cosine, or warm-up, stable, then linear decay over decay_steps."""
    warmup_steps: int = 0
    decay_steps: int = 0
    """Length of the last phase of wsd."""
    final_fraction: float = 0.1
    """The last rate over the peak rate."""

    def __post_init__(self) -> None:
        require_choice(
            "optim",
            name=(self.name, ("muon", "adamw")),
            schedule=(self.schedule, ("cosine", "wsd")),
        )
        require_positive(
            "optim",
            matrix_lr=self.matrix_lr,
            embedding_lr=self.embedding_lr,
            unembedding_lr=self.unembedding_lr,
            eps=self.eps,
        )
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name} is {value}; it must lie in [0, 1).")
        require_not_negative(
            "optim",
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            final_fraction=self.final_fraction,
        )


@dataclass(frozen=True)
class Train:
    """The loop."""

    steps: int = 100
    seed: int = 0
    """Seed of the initial weights."""
    grad_accum: int = 1
    """Micro-batches of one step; gradients are weighted by scored tokens."""
    z_loss: float = 0.0
    """Weight of the mean squared log-partition."""
    loss_chunk: int = 1024
    """Tokens per device whose logits exist at one time."""
    remat: Literal["none", "dots", "full"] = "none"
    """What a block's backward pass recomputes: nothing, all but matrix products, everything."""
    eval_every: int = 100
    """Steps between held-out evaluations (0: only at the end)."""
    eval_rows: int = 0
    """Held-out rows of an evaluation on the way (0: all); the last one reads all."""
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    """The last so many stay."""
    keep_every: int = 0
    """Checkpoints at multiples of so many steps stay, too (0: none)."""
    skip_bad_steps: int = 0
    """Steps of a run whose loss or gradient may be NaN or inf: they change no weight (0: stop)."""
    log_every: int = 10

    def __post_init__(self) -> None:
        require_positive(
            "train",
            steps=self.steps,
            grad_accum=self.grad_accum,
            loss_chunk=self.loss_chunk,
            checkpoint_every=self.checkpoint_every,
            keep_checkpoints=self.keep_checkpoints,
            log_every=self.log_every,
        )
        require_choice("train", remat=(self.remat, ("none", "dots", "full")))
        require_not_negative(
            "train",
            seed=self.seed,
            z_loss=self.z_loss,
            eval_every=self.eval_every,
            eval_rows=self.eval_rows,
            keep_every=self.keep_every,
            skip_bad_steps=self.skip_bad_steps,
        )
        require(
            self.keep_every % self.checkpoint_every == 0,
            f"train.keep_every is {self.keep_every}, not a multiple of train.checkpoint_every = "
            f"{self.checkpoint_every}; change one.",
        )


LONG = 6
"""Compiling, saving and restoring may take so many times `hosts.progress_timeout`."""


@dataclass(frozen=True)
class Hosts:
    """How long the processes of a run wait for each other, in seconds."""

    join_timeout: int = 300
    """Until all have joined, or have come to a point where all meet."""
    silence_timeout: int = 60
    """Without a sign of life, after which a process counts as dead."""
    progress_timeout: int = 600
    """For one thing (a batch, a step), after which the run counts as stuck; compiling, saving and
    restoring may take six times as long."""

    def __post_init__(self) -> None:
        require_positive(
            "hosts",
            join_timeout=self.join_timeout,
            silence_timeout=self.silence_timeout,
            progress_timeout=self.progress_timeout,
        )


@dataclass(frozen=True)
class Mesh:
    """Devices along each mesh axis."""

    data: int = 1
    """Batch, and FSDP of weights and optimizer state."""
    context: int = 1
    """Sequence; not built yet."""
    model: int = 1
    """Heads, FFN columns and vocabulary."""

    def __post_init__(self) -> None:
        require_positive("mesh", data=self.data, context=self.context, model=self.model)
        require(
            self.context == 1,
            f"mesh.context is {self.context}; context parallelism is not built yet, use 1.",
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.data, self.context, self.model)


@dataclass(frozen=True)
class Experiment:
    """One run: what an experiment file exports as EXPERIMENT."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    mesh: Mesh = field(default_factory=Mesh)
    hosts: Hosts = field(default_factory=Hosts)

    def __post_init__(self) -> None:
        batch, accum, shards = self.data.batch_size, self.train.grad_accum, self.mesh.data
        require(
            batch % (accum * shards) == 0,
            f"data.batch_size is {batch}, not a multiple of train.grad_accum × mesh.data = "
            f"{accum} × {shards}; change one of them.",
        )
        model, width = self.model, self.mesh.model
        for name, size in (("padded_vocab", model.padded_vocab), ("ffn_dim", model.ffn_dim)):
            require(
                size % width == 0,
                f"model.{name} is {size}, not a multiple of mesh.model = {width}; change one.",
            )
        require(
            model.dim % shards == 0,
            f"model.dim is {model.dim}, not a multiple of mesh.data = {shards}; change one.",
        )
        require(
            self.optim.warmup_steps + self.optim.decay_steps <= self.train.steps,
            f"optim.warmup_steps + optim.decay_steps is "
            f"{self.optim.warmup_steps + self.optim.decay_steps}, more than train.steps = "
            f"{self.train.steps}; shorten them or train longer.",
        )


def to_json(experiment: Experiment) -> str:
    """JSON text that `from_json` turns back into an equal Experiment."""
    tree = dataclasses.asdict(experiment)
    attention = experiment.model.attention
    mechanism = next(name for name, kind in MECHANISMS.items() if type(attention) is kind)
    tree["model"]["attention"] = {"mechanism": mechanism, **tree["model"]["attention"]}
    return json.dumps({"format_version": FORMAT_VERSION, **tree}, indent=2) + "\n"


def from_json(text: str, source: str) -> Experiment:
    """The Experiment that `to_json` wrote.

    Raises:
      UserError: not JSON, another format version, or an unknown, missing or ill-typed field.
    """
    try:
        tree = json.loads(text)
        version = tree.pop("format_version")
        require(
            version == FORMAT_VERSION,
            f"{source} has format version {version}, this vhajax reads {FORMAT_VERSION}; "
            "read it with the vhajax that wrote it.",
        )
        attention = tree["model"].pop("attention")
        kind = MECHANISMS[attention.pop("mechanism")]
        model = _build(Model, tree.pop("model"), attention=_build(kind, attention))
        parts = {"data": Data, "optim": Optim, "train": Train, "mesh": Mesh, "hosts": Hosts}
        built = {name: _build(parts[name], fields) for name, fields in tree.items()}
        return _build(Experiment, {}, model=model, **built)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{source} is not a configuration of vhajax ({cause}).") from error


def _build(kind: type, fields: dict[str, Any], **more: Any) -> Any:
    declared = {f.name: f.type for f in dataclasses.fields(kind)}
    missing = declared.keys() - fields.keys() - more.keys()
    if missing:  # today's default may not be the one of the day it was written
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(missing))}")
    built = {n: _read(f"{kind.__name__}.{n}", declared.get(n), x) for n, x in fields.items()}
    return kind(**built, **more)


def _read(name: str, wanted: Any, value: Any) -> Any:
    """A field's value from JSON."""
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        return _build(wanted, value)
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list) or any(type(x) is not int for x in value):
            raise TypeError(f"{name} is {value!r}, not a list of integers")
        return tuple(value)
    whole = wanted is float and type(value) is int
    if wanted in (int, float, str, bool) and type(value) is not wanted and not whole:
        raise TypeError(f"{name} is {value!r}, not {wanted}")
    return value
