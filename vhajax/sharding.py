"""The mesh, weights that carry their sharding, and einsums that say where their result lies.

Mesh axes are Explicit: `data` (batch, FSDP), `context` (sequence), `model` (heads, FFN columns,
vocabulary).
Without a mesh (a server that jits `decode_step` on one device) every function here is the identity.
"""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vhajax import config
from vhajax.errors import UserError

AXES = ("data", "context", "model")
SUMMED_DEVICES, SUMMED_BYTES = 64, 2**24  # see `phases`
Names = Sequence[str | None]
Group = Literal["matrix", "embedding", "unembedding", "vector"]


def make_mesh(mesh: config.Mesh, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The device mesh of a configuration, with Explicit axes.

    devices: this machine's by default.
    Raises:
      UserError: more devices asked for than there are, or not all of several processes.
    """
    found, processes = jax.devices() if devices is None else devices, jax.process_count()
    wanted, available = math.prod(mesh.shape), len(found)
    if wanted > available or (wanted < available and processes > 1):
        here = "this machine has" if processes == 1 else f"these {processes} processes have"
        fix = "make the mesh smaller" if wanted > available else "make the mesh larger"
        raise UserError(
            f"mesh {mesh.data} × {mesh.context} × {mesh.model} (data × context × model) needs "
            f"{wanted} devices, {here} {available}; {fix}."
        )
    if wanted < available:
        warnings.warn(f"the mesh uses {wanted} of {available} devices", stacklevel=2)
    return jax.make_mesh(mesh.shape, AXES, (AxisType.Explicit,) * 3, devices=found[:wanted])


def _mesh() -> Any:
    """The mesh in use, abstract or not; None where there is none or its axes are not ours."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or set(mesh.manual_axes) else mesh


def held_rows(where: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """Indices of the rows of an array of `shape` that this process's devices hold, ascending."""
    parts = where.addressable_devices_indices_map(shape).values()
    return sorted({row for index in parts if index for row in range(shape[0])[index[0]]})


def place(
    x: np.ndarray, where: NamedSharding, shape: tuple[int, int], rows: Sequence[int] | None = None
) -> jax.Array:
    """A global array of `shape` from the rows that this process has (None: all)."""
    at = {row: i for i, row in enumerate(range(shape[0]) if rows is None else rows)}

    def part(index: Any) -> np.ndarray:
        return x[[at[row] for row in range(shape[0])[index[0]]], index[1]]

    return jax.make_array_from_callback(shape, where, part)


@functools.cache
def _warn_replicated(size: int, axis: str, count: int) -> None:
    warnings.warn(
        f"a dimension of {size} does not divide over {axis} = {count} and is replicated",
        stacklevel=3,
    )


def resolve(names: Names, shape: Sequence[int]) -> PartitionSpec:
    """The one rule: a dimension lies on its mesh axis if it divides evenly, else is replicated."""
    mesh = _mesh()
    if mesh is None:
        return PartitionSpec()
    spec = []
    for name, size in zip(names, shape, strict=True):
        count = mesh.shape[name] if name else 1
        if size % count:
            _warn_replicated(size, name or "", count)
        spec.append(name if name and size % count == 0 else None)
    return PartitionSpec(*spec)


def reshard(x: jax.Array, names: Names) -> jax.Array:
    """x laid out as `names` says."""
    return x if _mesh() is None else jax.reshard(x, resolve(names, x.shape))


class Whole(NamedTuple):
    """A weight gathered along `data`, beside what it was gathered from, which gets its gradient.

    A gradient of `array` would be summed to a whole copy on every device (an all-reduce) before it
    is cut to size; for `stored` it is reduce-scattered, half the bytes.

    array: a jax.Array in compute dtype; None in a gradient, as none goes through it.
    stored: laid out over `data`.
    """

    array: Any
    stored: jax.Array

    def astype(self, dtype: Any) -> "Whole":
        return Whole(self.array.astype(dtype), self.stored)


def einsum(
    equation: str, x: jax.Array, w: jax.Array | Whole, *, out: Names, precision: Any = None
) -> jax.Array:
    """`jnp.einsum` of two operands whose result lies as `out` says (one name a letter).

    precision: by default float32 operands are multiplied as such, where a TPU would take bfloat16.
    """
    array, stored = w if isinstance(w, Whole) else (w, None)
    if precision is None and x.dtype == array.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    sharding = None
    if _mesh() is not None:
        left, right, result = re.split(",|->", equation)
        sizes = dict(zip(left + right, x.shape + array.shape, strict=True))
        sharding = resolve(out, [sizes[letter] for letter in result])
    # Named for `transformer.POLICIES`: they cannot see a product inside a custom derivative.
    place = None if stored is None else (_placed(stored), stored.dtype)
    return checkpoint_name(
        _einsum(equation, x, array, stored, sharding, precision, place), "product"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4, 5, 6))
def _einsum(
    equation: str, x: Any, w: Any, stored: Any, sharding: Any, precision: Any, place: Any
) -> jax.Array:
    """JAX's own gradient of w is (dyᵀ x)ᵀ; xᵀ dy saves XLA:CPU transposes, a third of an FFN.

    stored, place: what w was gathered from, if anything, and its layout and dtype.
    """
    del stored, place
    with jax.named_scope(equation):
        return jnp.einsum(_in_order(equation), x, w, out_sharding=sharding, precision=precision)


def _in_order(equation: str) -> str:
    """The equation in letters that rise: JAX contracts them alphabetically, and XLA:CPU copies an
    operand that lies in another order (W_O, at every step)."""
    letters = dict.fromkeys(filter(str.isalpha, equation))
    return equation.translate({ord(letter): ord("a") + i for i, letter in enumerate(letters)})


def _einsum_forward(equation: str, x: Any, w: Any, stored: Any, sharding: Any, precision: Any, _):
    return _einsum(equation, x, w, stored, sharding, precision, None), (x, w)


def _einsum_backward(equation: str, _: Any, precision: Any, place: Any, operands: Any, dy: Any):
    x, w = operands
    left, right, result = re.split(",|->", equation)
    flipped = f"{left},{result}->{right}"
    dx = _einsum(f"{result},{right}->{left}", dy, w, None, _placed(x), precision, None)
    if place is None:
        return dx, _einsum(flipped, x, dy, None, _placed(w), precision, None), None
    spec, dtype = place
    of_w = dict(zip(right, _placed(w) or (), strict=True))
    lies = [
        [of_w.get(letter, axis) for letter, axis in zip(letters, _placed(a) or (), strict=True)]
        for letters, a in ((left, x), (result, dy))
    ]
    product = functools.partial(jnp.einsum, flipped, precision=precision)
    return dx, None, reduce_scattered(product, lies, spec)(x, dy).astype(dtype)


_einsum.defvjp(_einsum_forward, _einsum_backward)


def reduce_scattered(
    function: Callable, in_names: Sequence[Names], names: Names
) -> Callable[..., jax.Array]:
    """`function` on each device's shards, its results summed over tokens and laid out as `names`.

    Not differentiable.
    """
    dimension = list(names).index("data")

    def run(*args: jax.Array) -> jax.Array:
        return reduce_scatter(function(*args), dimension)

    return local(run, in_names, names, differentiable=False)


def reduce_scatter(partial: jax.Array, dimension: int) -> jax.Array:
    """Inside `local`: the sum over tokens' devices, each keeping its part of a dimension."""
    total = jax.lax.psum(partial, "context")
    count = jax.lax.axis_size("data")
    rounds = phases(count, platform())
    # Parts in front, where XLA:TPU cuts between whole tiles; elsewhere it may sum all of it first.
    before, size, after = (
        total.shape[:dimension],
        total.shape[dimension],
        total.shape[dimension + 1 :],
    )
    parts = jnp.moveaxis(total.reshape(*before, count, size // count, *after), dimension, 0)
    for groups in rounds:
        each = count if groups is None else len(groups[0])
        parts = parts.reshape(each, -1, *parts.shape[1:])
        parts = jax.lax.psum_scatter(parts, "data", axis_index_groups=groups)
    return parts[0]


def all_gather(shard: jax.Array, dimension: int) -> jax.Array:
    """Inside `local`: the parts of a dimension that devices along `data` hold, put together."""
    count = jax.lax.axis_size("data")
    small = count * shard.size * shard.dtype.itemsize <= SUMMED_BYTES and count >= SUMMED_DEVICES
    parts = shard
    for groups in reversed(phases(count, platform())) if small else (None,):
        parts = jax.lax.all_gather(parts, "data", axis_index_groups=groups)
    parts = jnp.moveaxis(parts.reshape(count, *shard.shape), 0, dimension)
    return parts.reshape(*shard.shape[:dimension], -1, *shard.shape[dimension + 1 :])


def phases(size: int, platform: str) -> list[list[list[int]] | None]:
    """Groups of devices along `data` for one reduce-scatter after the other, which make up one.

    XLA:TPU turns a reduce-scatter over a whole square torus (4×4, 8×8, 16×16) into an all-reduce,
    twice the bytes, but neither one over its columns nor one over its rows. So it does with an
    all-gather over SUMMED_DEVICES or more of up to SUMMED_BYTES (libtpu 0.0.50).
    """
    side = math.isqrt(size)
    if platform != "tpu" or side * side != size or side < 4:
        return [None]
    rows = [[row * side + column for column in range(side)] for row in range(side)]
    return [[list(column) for column in zip(*rows, strict=True)], rows]


def _placed(x: jax.Array) -> PartitionSpec | None:
    return None if _mesh() is None else jax.typeof(x).sharding.spec


def local(
    function: Callable, in_names: Sequence[Names], out_names: Any, *, differentiable: bool = True
) -> Callable:
    """`function` on each device's shards (`jax.shard_map`), or as it is without a mesh.

    in_names: names per argument. out_names: names of the only result, or a list, one per result.
    The specs are taken as given: the caller resolves what does not divide.
    differentiable: tracks which values vary over the mesh, which exact gradients need.
    """
    if _mesh() is None:
        return function
    specs = tuple(PartitionSpec(*names) for names in in_names)
    many = isinstance(out_names, list)
    outs = tuple(PartitionSpec(*n) for n in out_names) if many else PartitionSpec(*out_names)

    shard = jax.shard_map(function, in_specs=specs, out_specs=outs, check_vma=differentiable)

    def run(*args: jax.Array) -> Any:
        placed = [jax.reshard(a, s) for a, s in zip(args, specs, strict=True)]
        return shard(*placed)

    return run


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what the mesh in use compiles for, else what this machine has."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def data_size() -> int:
    """Devices along `data`; 1 without a mesh."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.shape["data"]


def model_size() -> int:
    """Devices along `model`; 1 without a mesh."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.shape["model"]


def axis_for(axis: str, size: int) -> str | None:
    """The mesh axis if `size` divides over it, else None (replicated)."""
    return resolve((axis,), (size,))[0] if _mesh() is not None else None


def head_axes(num_heads: int, num_kv_heads: int) -> tuple[str | None, str | None]:
    """The mesh axes of query heads and of KV heads inside attention.

    Both lie over `model` where both divide. Where only query heads do, KV heads are replicated and
    a device reads the ones that its query heads need, as long as those are whole: otherwise every
    head is replicated.
    """
    if _mesh() is None:
        return None, None
    shards = model_size()
    if num_heads % shards:
        return axis_for("model", num_heads), None  # warns
    group, mine = num_heads // num_kv_heads, num_heads // shards
    if num_kv_heads % shards == 0:
        return "model", "model"
    if num_kv_heads > 1:
        axis_for("model", num_kv_heads)  # warns
    return ("model", None) if group % mine == 0 else (None, None)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """How Muon sees a weight: leading batch axes, then row axes, then column axes, each merged."""

    batch: int = 0
    rows: int = 1


def weight(
    value: jax.Array, names: Names, group: Group = "matrix", matrix: Matrix = Matrix()
) -> nnx.Param:
    """A parameter with its sharding, its optimizer group and its shape as a matrix beside it."""
    if len(names) != value.ndim:
        raise ValueError(f"{len(names)} axis names for a weight of shape {value.shape}")
    return nnx.Param(value, names=tuple(names), group=group, matrix=matrix)


def gathered(param: nnx.Param, dtype: Any) -> jax.Array:
    """The weight in compute dtype, whole along `data`: FSDP's all-gather, after the cast."""
    return _whole_along_data(param.get_value(), param.get_metadata("names"), dtype)


def operand(param: nnx.Param, dtype: Any) -> jax.Array | Whole:
    """The same for `einsum`, `layers.embed` and `loss.cross_entropy`: see `gather`."""
    return gather(param.get_value(), param.get_metadata("names"), dtype)


def gather(x: jax.Array, names: Names, dtype: Any) -> jax.Array | Whole:
    """A weight that lies as `names` say, whole along `data`, its gradient reduce-scattered."""
    mesh, spec = _mesh(), resolve(names, x.shape)
    if mesh is None or mesh.shape["data"] == 1 or "data" not in spec:
        return _whole_along_data(x, names, dtype)
    dimension = spec.index("data")

    def run(shard: jax.Array) -> jax.Array:
        return all_gather(shard.astype(dtype), dimension)

    out = tuple(None if axis == "data" else axis for axis in spec)
    return Whole(local(run, [tuple(spec)], out, differentiable=False)(jax.lax.stop_gradient(x)), x)


def _whole_along_data(x: jax.Array, names: Names, dtype: Any) -> jax.Array:
    return reshard(x.astype(dtype), [None if name == "data" else name for name in names])


def placement(param: nnx.Param, shape: Sequence[int]) -> PartitionSpec:
    """Where a weight lies; axes stacked in front of its own (layers) are replicated."""
    names = param.get_metadata("names")
    stacked = (None,) * (len(shape) - len(names))
    return resolve((*stacked, *names), shape)


def named_params(model: nnx.Module) -> dict[str, nnx.Param]:
    """Every parameter by its path, for example `blocks.attention.query`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        model, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return {_path(path): leaf for path, leaf in leaves}


def _path(path: Sequence[Any]) -> str:
    keys = (str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path)
    return ".".join(key for key in keys if key)


def named_arrays(model: nnx.Module) -> dict[str, Any]:
    """Every parameter's array by its path."""
    return {name: param.get_value() for name, param in named_params(model).items()}


def with_arrays(model: Any, arrays: dict[str, Any]) -> Any:
    """`model` with its arrays replaced, by the paths that `named_arrays` gives."""
    paths, tree = jax.tree_util.tree_flatten_with_path(
        model, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    leaves = []
    for path, param in paths:
        leaf = jax.tree.structure(param).unflatten([arrays[_path(path)]])
        leaves.append(leaf)
    return tree.unflatten(leaves)


def shardings(model: nnx.Module, mesh: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    """Where every parameter lies on a mesh, by path; call under `jax.set_mesh(mesh)`."""
    return {
        name: NamedSharding(mesh, placement(param, param.get_value().shape))
        for name, param in named_params(model).items()
    }
