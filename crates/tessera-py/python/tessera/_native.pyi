# An op of arrays alone runs at once and returns an array; with a traced value among them it returns a traced value. Type
# checkers see the first case as a part of the second.

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

__version__: str

Float32Array: TypeAlias = NDArray[np.float32]
Spec: TypeAlias = ReplicateSpec | ShardSpec
Operand: TypeAlias = Value | DTensor
ArrayLike: TypeAlias = Float32Array | DTensor | LocalArray | SupportsDlpack
Router: TypeAlias = Callable[[Any, RouterMeta], Any]
Path: TypeAlias = str | PathLike[str]
Piece = TypeVar("Piece", str, tuple[int, str])

class SupportsDlpack(Protocol):
    """An array of another library, such as a tensor of torch."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> Any: ...

def run_command_line(arguments: Sequence[str], executable: str, leading: Sequence[str]) -> int: ...
def explain_code(code: str) -> str | None: ...

class Mesh:
    """A mesh of devices with named axes.

    The axes are ``tp``, ``ep``, ``pp`` and ``dp``, in this order; the first varies fastest from rank to rank. ``shape`` gives
    each a size, and ``devices`` lists one name per rank, in rank order: a GPU by its UUID, PCI bus id or
    number, such as ``GPU3``. Without it, the ranks of a host get its GPUs in order.
    """

    def __new__(
        cls, axes: Sequence[str], shape: Mapping[str, int], devices: Sequence[str] | None = None
    ) -> Mesh: ...
    @property
    def axes(self) -> list[str]:
        """Names of the axes; the first varies fastest from rank to rank."""
    @property
    def shape(self) -> dict[str, int]:
        """Number of devices along each axis."""
    @property
    def devices(self) -> list[str]:
        """Names of the devices, in rank order."""
    @property
    def size(self) -> int:
        """Number of devices."""
    def __len__(self) -> int: ...
    def coord(self, rank: int) -> dict[str, int]:
        """Returns the position of a rank on each axis."""
    def rank(self, **position: int) -> int:
        """Returns the rank at a position; an axis that is not given has position 0."""
    def _repr_html_(self) -> str: ...

class ReplicateSpec:
    """A layout that is replicated over mesh axes."""

    def __new__(cls, mesh_axes: Sequence[str] = ()) -> ReplicateSpec: ...
    @property
    def mesh_axes(self) -> list[str]: ...

class ShardSpec:
    """A layout that shards named dims over mesh axes, one axis per dim, and is replicated over the others.

    Names of dims are ``col``, ``row``, ``experts``, ``head``, ``batch``, ``token``, ``vocab``, ``hidden`` and ``depth``. The dims
    of a weight [out, in] are ``col`` and ``row``: ``col`` shards its output features, ``row`` its input features.
    """

    def __new__(cls, partition: Sequence[str], mesh_axes: Sequence[str]) -> ShardSpec: ...
    @property
    def partition(self) -> list[str]: ...
    @property
    def mesh_axes(self) -> list[str]: ...

class DTensor:
    """An array with a layout over a mesh."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the whole tensor."""
    @property
    def dtype(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the dims."""
    @property
    def sharding(self) -> dict[str, str]:
        """The axis that shards each sharded dim."""
    @property
    def total_bytes(self) -> int:
        """Bytes that all devices of the mesh hold together."""
    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the extents of a rank's shard."""
    @property
    def device(self) -> str:
        """The kind of device in whose memory the shards lie: ``"cpu"`` or ``"gpu"``."""
    def local(self, rank: int) -> LocalArray:
        """Returns a rank's shard, in the memory of this tensor."""
    def gather(self) -> Float32Array:
        """Returns the whole tensor as a read-only array: over the memory of this tensor, or a copy of the shards on GPUs."""
    def redistribute(self, spec: Spec) -> DTensor:
        """Returns this tensor in another layout. The ranks exchange shards by a planned and verified program."""
    def _repr_html_(self) -> str: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @overload
    def __add__(self, other: DTensor) -> DTensor: ...
    @overload
    def __add__(self, other: Value) -> Value: ...
    @overload
    def __mul__(self, other: DTensor) -> DTensor: ...
    @overload
    def __mul__(self, other: Value) -> Value: ...

class LocalArray:
    """The part of a DTensor that one rank holds, which numpy, torch and jax read in its place: ``torch.from_dlpack(x.local(0))``.

    It keeps the memory alive, and so does what others make of it. Nobody may write the memory: ranks read it at any time.
    ``copy=True`` gives a consumer memory of its own.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str:
        """The device in whose memory the values lie, such as ``"cpu"`` or ``"gpu:0"``."""
    def to_host(self) -> Float32Array:
        """Returns the values as a read-only array: over the memory of the tensor, or a copy of that of a GPU."""
    def __len__(self) -> int: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def distribute(
    array: Any,
    mesh: Mesh,
    spec: Spec,
    *,
    dims: Sequence[str] | None = None,
    units: Mapping[str, int] | None = None,
    copy: bool | None = None,
) -> DTensor:
    """Distributes an array of float32 over a mesh.

    A row-major array in host memory is shared. One of numpy becomes read-only; a view of an array that can still be written, and a
    buffer that offers writes, are copied. Memory of another library that comes by DLPack, such as that of torch or jax, is shared as it
    is: do not write it while the tensor, or anything made of it, is in use. Another order of elements is copied.

    An array in GPU memory stays there. The mesh gives each rank a GPU of this process, and a shard shares the memory of the array if it
    is contiguous and on the GPU of its rank. Any other shard is copied from GPU to GPU, and this waits for the copies.

    ``copy=True`` copies always, and ``copy=False`` refuses an array that would have to be copied. ``dims`` names the dims; without
    it they are those of a weight. ``units`` gives the number of elements of a dim that stay together, such as the columns of a head.
    """

class Numeric:
    """The precision of a program, as its layers state it."""

    @property
    def dtype(self) -> str: ...
    @property
    def accum(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def scale(self) -> str | None: ...
    @property
    def stochastic_round(self) -> bool: ...
    @property
    def seed(self) -> int | None: ...

def numeric(
    dtype: str = "f32",
    accum: str = "f32",
    *,
    deterministic: bool = False,
    scale: str | None = None,
    stochastic_round: bool = False,
    seed: int | None = None,
) -> Numeric:
    """Creates a precision policy: ``f32``, ``bf16`` or ``fp8_e4m3``, in which matmuls add in f32.

    Under fp8 the linear layers multiply in e4m3, with one scale per row of each operand, and their results are bf16; logits of
    experts stay f32, and experts and attention compute in bf16.

    With ``stochastic_round``, a value that becomes bf16 or e4m3 goes to one of its two neighbours, drawn so that the mean of many
    draws is the value. The draw is a function of ``seed`` (0 by default), the place of the conversion in the program and the place of
    the element in the whole array: every run and every mesh rounds alike, and so does every call. Weights, and the results that
    ops themselves round to bf16, are rounded to nearest.

    A program has one precision: layers that state one agree, and the others follow. Ranks add partial sums in the order of their
    numbers, in bf16 and fp8 after rounding them to bf16, so a plan always gives the same bits, and two meshes differ in the last digits.

    If a layer states ``deterministic``, no bit of the results of its plan depends on the mesh. Sums in f32 are then added in one tree on
    every mesh, and operands whose sums would depend on it are gathered, as in bf16, in fp8 and for sharded experts.
    """

class Layer:
    """A layer: an op with its attributes, without its weights."""

    @overload
    def __call__(self, *operands: DTensor) -> DTensor: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, *operands: Operand) -> Value: ...
    @property
    def policy(self) -> Numeric | None: ...

def linear(*, activation: str | None = None, policy: Numeric | None = None) -> Layer:
    """Creates act(x · wᵀ + bias), called as ``layer(x, w)`` or ``layer(x, w, bias)``: x [tokens, in], w [out, in], bias [out].

    ``activation`` is ``"gelu_tanh"`` or ``"silu"``.
    """

def layer_norm(eps: float = 1e-5) -> Layer:
    """Creates a layer norm of rows, called as ``layer(x, weight, bias)``."""

def rms_norm(eps: float = 1e-6) -> Layer:
    """Creates an RMS norm of rows, called as ``layer(x, weight)``."""

def softmax(dim: int | None = None) -> Layer:
    """Creates a softmax along one dim, by default the last."""

def silu() -> Layer:
    """Creates x · sigmoid(x), element by element."""

def relu() -> Layer:
    """Creates the larger of x and 0, element by element."""

def embedding() -> Layer:
    """Creates a lookup, called as ``layer(ids, table)``: rows of table [rows, hidden] by ids [tokens], whole numbers in float32."""

def flash_attention(
    num_heads: int,
    head_dim: int,
    causal: bool = False,
    policy: Numeric | None = None,
    *,
    q_layout: Spec | None = None,
    k_layout: Spec | None = None,
    v_layout: Spec | None = None,
    sequences: int = 1,
) -> Layer:
    """Creates attention, called as ``layer(q, k, v)`` for q, k and v [tokens, heads · head_dim].

    With ``sequences``, the rows are those of so many sequences of equal length, one behind the other.
    """

class RouterMeta:
    """What a router may know besides the logits: the ranks of tokens and of experts."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def expert_to_group(self) -> list[int]:
        """The rank of ``ep`` that holds each expert."""
    def group_of_token(self, token: int) -> int:
        """Returns the rank of ``ep`` on which a token is at home.

        Each rank is the home of ⌈tokens / ranks⌉ consecutive tokens; the last ranks may have fewer.
        """
    def apply(self, cost: Callable[[int, int], float]) -> Float32Array:
        """Returns cost(expert, group of the token) for each token and expert, as an array [tokens, experts]."""

class Moe:
    """A mixture of experts. An expert is gate, up, SiLU and down."""

    @overload
    def __call__(self, x: DTensor, router: DTensor, gate: DTensor, up: DTensor, down: DTensor) -> DTensor: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, x: Operand, router: Operand, gate: Operand, up: Operand, down: Operand) -> Value: ...
    @overload
    def route(self, x: DTensor, router: DTensor) -> DTensor: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def route(self, x: Operand, router: Operand) -> Value: ...
    @overload
    def regularizer_loss(self, x: DTensor, router: DTensor) -> DTensor: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def regularizer_loss(self, x: Operand, router: Operand) -> Value: ...
    @overload
    def count_tokens(self, x: DTensor, router: DTensor) -> DTensor: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def count_tokens(self, x: Operand, router: Operand) -> Value: ...
    def capacity(self, tokens: int) -> int:
        """Returns the largest number of tokens that each expert takes of so many."""
    @property
    def policy(self) -> Numeric | None: ...

def moe(
    num_experts: int,
    top_k: float | None = None,
    capacity_factor: float = 1.25,
    gate: str = "topk_softmax",
    experts_layout: Spec | None = None,
    policy: Numeric | None = None,
    *,
    seed: int = 0,
) -> Moe:
    """Creates a mixture of experts, called as ``layer(x, router, gate, up, down)``.

    x is [tokens, d], router [experts, d], gate and up [experts, inner, d], down [experts, d, inner]. Gates are
    ``"topk_softmax"``, ``"topk_sigmoid"`` and ``"topk_softmax_locality_penalized"``, which subtracts 0.05 from the logits of
    experts on another rank of ``ep`` than the token. Weights of the chosen experts are divided by their sum, and equal scores
    go to the lower expert.

    An expert takes ⌈capacity_factor · tokens · top_k / num_experts⌉ tokens, in their order; a token that finds no slot of an expert
    does without it. Where x is sharded by equal shards of tokens, each rank routes its own: the tokens in the formula are then those
    of a rank. With the experts sharded over the same axis, an all-to-all takes the slots to their experts and another one takes the
    results back. ``count_tokens`` gives, for each expert, the tokens that chose it, those with a slot, 0, and those without one.

    With a fraction, such as ``top_k=1.5``, each token draws whether it has the last of ⌈top_k⌉ experts. The draw is a function of
    ``seed`` and the token's row. Layers whose tokens shall draw differently need different seeds.
    """

def set_router(layer: Moe, router: Router) -> None:
    """Replaces the logits of a mixture of experts by what a function makes of them.

    The function is traced once into the program, so it is the same on every rank.
    """

def set_router_regularizer(layer: Moe, kind: str, weight: float) -> None:
    """Sets the term that a training loss adds for tokens whose experts are far away; a weight of 0 removes it."""

class ArraySpec:
    """The shape and layout of an input, whose values come with each call."""

    def __new__(
        cls,
        shape: Sequence[int],
        mesh: Mesh | None = None,
        spec: Spec | None = None,
        *,
        dims: Sequence[str] | None = None,
        units: Mapping[str, int] | None = None,
    ) -> ArraySpec: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

class Value:
    """A value of a function that is being traced."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __add__(self, other: Operand | Float32Array | float) -> Value: ...
    def __radd__(self, other: Float32Array | float) -> Value: ...
    def __sub__(self, other: Operand | Float32Array | float) -> Value: ...
    def __rsub__(self, other: Float32Array | float) -> Value: ...
    def __neg__(self) -> Value: ...
    def __mul__(self, other: Operand | Float32Array | float) -> Value: ...
    def __rmul__(self, other: Float32Array | float) -> Value: ...

class Graph:
    """A program: ops without ranks, the layouts of its inputs, and the arrays that its function captured."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> list[str]: ...
    @property
    def outputs(self) -> list[str]: ...
    @property
    def weights(self) -> list[str]: ...
    @property
    def mesh(self) -> Mesh | None:
        """The mesh over which the arrays were distributed."""
    def text(self) -> str:
        """Returns the program in the text form that the command line reads; so does ``str(graph)``."""
    def save(self, folder: Path, *, weights: bool = True) -> None:
        """Writes the function into a new folder, from which ``load`` reads it.

        ``program.tir`` has the program, ``function.json`` how its arrays are sharded and over which mesh they were distributed, and
        ``weights.safetensors`` the weights, unless ``weights=False`` leaves them to be given again.
        """
    def compile(
        self,
        mesh: Mesh | None = None,
        cluster: str | None = None,
        objective: str | None = None,
        devices: int | None = None,
        hosts: Sequence[int] = ...,
    ) -> Plan:
        """Shards the program over a mesh, and proves that its ranks can neither hang nor drift.

        Without a mesh it is the mesh of the arrays. Another mesh must name every axis that shards an array; its sizes may differ.
        ``cluster`` names the machine that ``report``, ``estimate`` and ``why`` speak of, and refuses a plan that it cannot run: T1201 for
        more ranks than devices, T1217 for a rank that needs more memory than a device has. With an ``objective``
        (``"latency"``, ``"throughput"`` or ``"memory"``) and no mesh, the best mesh is searched among those of the axes with one rank for
        each of the cluster's devices, or of so many of them as ``devices`` says. Every mesh uses the same devices, so latency and
        throughput prefer the same one.

        ``hosts`` states how many consecutive ranks each host has, such as ``[4, 4]``. The plan then states the path of every group
        (``Plan.group_paths``), the verifier proves it, and ranks that meet are refused if they split a stated host (T0777).
        """

def trace(function: Callable[..., Any], *arguments: DTensor | ArraySpec, name: str | None = None) -> Graph:
    """Traces a function into a program.

    Each argument gives the shape and layout of a parameter. Arrays that the function uses besides its parameters become
    weights. It returns a value, a tuple of values or a dict of values.
    """

def parse(
    text: str,
    mesh: Mesh | None = None,
    *,
    inputs: Mapping[str, ArraySpec] = ...,
    weights: Mapping[str, DTensor] = ...,
) -> Graph:
    """Parses the text of a program, as ``str(graph)`` prints it.

    A text says nothing of layouts: ``inputs`` and ``weights`` state them by name, and other arrays are replicated. Weights are
    given all or none; without them the program can be planned, and not run.
    """

def load(folder: Path, *, weights: Mapping[str, object] | None = None) -> Graph:
    """Reads a function that ``Graph.save`` wrote. Arrays in ``weights`` take the place of those of the folder."""

def load_plan(
    folder: Path,
    *,
    weights: Mapping[str, object] | Path | None = None,
) -> Plan:
    """Reads a plan that ``Plan.save`` wrote and proves it again. A changed file is refused with its code.

    ``weights`` has the arrays by name, or is a safetensors file with them, such as ``weights.safetensors`` of a saved function. Without
    them the plan can be read, and not run. A plan names no dims: those of outputs have the names of weights.
    """

def compile(
    *graphs: Graph,
    mesh: Mesh | None = None,
    cluster: str | None = None,
    objective: str | None = None,
    devices: int | None = None,
    hosts: Sequence[int] = ...,
) -> Plan:
    """Plans several programs for one run, whose ranks load all of them; the arguments are those of ``Graph.compile``."""

class Plan:
    """A sealed plan: verified programs for each rank of a mesh."""

    @property
    def digest(self) -> str:
        """The digest that every rank compares before a call."""
    @property
    def mesh(self) -> Mesh: ...
    @property
    def group_paths(self) -> dict[str, str]:
        """The path between the ranks of each group, such as ``peer memory`` or ``network``; none unless the plan states hosts."""
    @property
    def stream_ids(self) -> dict[str, int]:
        """The numbers of the streams when the plan was made, by name."""
    @property
    def graphs(self) -> list[Graph]:
        """The programs before they were sharded; none for a plan that was read from a folder."""
    @property
    def weight_shapes(self) -> dict[str, list[int]]:
        """The names and whole shapes of the weights."""
    def text(self, rank: int = 0, program: str | None = None) -> str:
        """Returns a program of a rank: every value with its layout, every collective and every wait.

        Without a name it is the only program.
        """
    def collectives(self, rank: int = 0, program: str | None = None) -> list[tuple[str, str, int]]:
        """Returns the collectives of a rank in order: op, axis, and bytes of the operand."""
    def memory(self) -> list[list[int]]:
        """Returns the bytes of weights, inputs and temporaries of each rank."""
    def explain(self) -> str:
        """Says in words what each rank does, and why the plan has this mesh, as a table of meshes, if an objective was stated."""
    def why(self, **sizes: int) -> str:
        """Says what the sizes of a mesh would cost, or which constraints they break: ``why(tp=12, ep=6)``.

        The machine is that of the plan, with as many devices as the plan has ranks. Axes without a size have one rank.
        """
    def estimate(self, cluster: str | None = None) -> PlanEstimate:
        """Estimates a call of every program on a machine of the catalog: by default that of the plan, or else a laptop.

        A cluster with ``host.bytes`` 0 refuses experts in two tiers with T0806.
        """
    def report(self, cluster: str | None = None) -> str:
        """Says in words what each rank does, and how long a call takes on a machine, by default as in ``estimate``."""
    def verify(self) -> list[str]:
        """Runs the verifier over the programs again, and returns what it proves, a sentence for each property."""
    def seal(self) -> tuple[str, dict[str, str]]:
        """Returns the digest, and the parts that it covers by name. Two plans have one digest if these are equal."""
    def save(self, folder: Path) -> None:
        """Writes the plan to a new folder, which ``tessera check`` proves again. Weights are not part of a plan."""
    def _repr_html_(self) -> str: ...

class PlanEstimate:
    """The estimated cost of a call of every program of a plan on a machine."""

    @property
    def ns(self) -> float:
        """Nanoseconds from the start of the call to the end of the last rank."""
    @property
    def exposed_ns(self) -> float:
        """Nanoseconds of collectives that no compute hides, as a mean over the ranks."""
    @property
    def sent_bytes(self) -> float:
        """Bytes that all ranks together send."""
    @property
    def flops(self) -> float:
        """Floating-point operations of all ranks."""
    @property
    def fetch_wait_ns(self) -> float:
        """Nanoseconds for which the rank that waits longest waits for experts from host memory.

        Each expert is equally likely in every call, so a call fetches the experts that it uses and its rank does not hold. 0 if
        no layer is registered for prefetch.
        """
    @property
    def fetched_bytes(self) -> float:
        """Bytes of these experts."""
    def __eq__(self, other: object) -> bool: ...

class Search:
    """A question about the mappings of a model on a machine."""

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of a recipe, with a device for every rank; ``None`` for a question without one."""
    def report(self) -> str:
        """Searches the mappings and returns the report, as text."""
    def html(self) -> str:
        """Searches the mappings and returns the report, as a page for a browser."""
    def json(self) -> str:
        """Searches the mappings and returns the report as the text of a JSON object."""
    def why(self, **pins: int | str) -> str:
        """Says how good one mapping is, or why it is refused: ``why(tp=12, ep=6)``."""

def recipe(name: str, *, cluster: str | None = None) -> Search:
    """Returns a recipe of the mapping guide, such as ``"A"``: its model, its work and its mesh on a rack."""

def search(
    model: str,
    *,
    cluster: str = "gb200-nvl72",
    objective: str = "throughput",
    devices: int | None = None,
    **pins: int | str,
) -> Search:
    """Returns the question how to map a model of the zoo, or of a config.json, onto a machine of the catalog."""

class Topology:
    """A machine of the catalog: how many devices it has, and how they are linked."""

    @property
    def name(self) -> str: ...
    @property
    def devices(self) -> int: ...
    @property
    def domain_size(self) -> int:
        """Number of devices that one switch fabric connects at full bandwidth."""
    @property
    def memory_bytes(self) -> float:
        """Bytes of memory of a device."""
    @property
    def memory_bytes_per_second(self) -> float: ...
    @property
    def link_bytes_per_second(self) -> list[float]:
        """Of a device's links in one direction: within a domain, within a rack and between racks."""

def topology(name: str) -> Topology:
    """Returns a machine of the catalog, or of a cluster.toml; ``"nvl72"`` is the rack of the mapping guide."""

def plan_memory(
    P: float,
    A: float,
    K: float,
    E: int,
    H: float,
    *,
    tokens: float,
    cached_tokens: float | None = None,
    layers: int = 1,
    bytes_per_parameter: float = 2.0,
    expert_parameters: float = 0.0,
    tp: int = 1,
    ep: int = 1,
) -> list[tuple[str, str, int, float]]:
    """Returns the memory of one rank as rows of name, formula with units, bytes, and share of the device's memory.

    P is the number of parameters of a layer without routed experts, A the bytes of activations and K those of keys and values of
    a token in a layer, E the experts of a layer, and H the bytes of a device.
    """

class Session:
    """The loaded ranks of a plan, which run one program per call."""

    def __call__(self, *arguments: ArrayLike, **named: ArrayLike) -> Any:
        """Runs the only program of the plan.

        Inputs are arrays or DTensors, in the order of the program's inputs or by name.
        """
    def run(self, program: str, *arguments: ArrayLike, **named: ArrayLike) -> Any:
        """Runs one program of the plan."""
    @property
    def plan(self) -> Plan: ...
    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks that this session started, in rank order; empty if they are threads."""
    def prefetch_report(self) -> PrefetchReport:
        """Returns what the ranks did with the experts of registered layers, in the last 4096 calls; of joined ranks, rank 0 alone."""
    def trace(self) -> SessionTrace:
        """Returns the trace of the calls so far, of a session that was opened with ``trace=True``.

        It stays available after the end of the session.
        """
    def record(self) -> SessionRecord:
        """Returns the record of the calls so far. It stays available after the end of the session."""
    def close(self) -> None:
        """Ends the ranks and waits for them."""
    def __enter__(self) -> Session: ...
    def __exit__(self, *exception: object) -> None: ...

class TraceEvent:
    """An op on a rank: when it ran, and on which stream. A collective has three events, from its issue to its wait."""

    @property
    def rank(self) -> int: ...
    @property
    def call(self) -> int:
        """Number of the call, from 1."""
    @property
    def program(self) -> str: ...
    @property
    def stream(self) -> str:
        """Name of the stream: a wait is on the stream that waits, issue and flight are on that of the collective."""
    @property
    def stream_id(self) -> int:
        """Number of the stream, as ``set_stream_map`` gave it to the plan."""
    @property
    def op(self) -> str:
        """Name of the op; for a wait, of the collective that it waits for."""
    @property
    def kind(self) -> str:
        """What the rank did.

        ``"compute"``; or for a collective ``"issue"``, in which the rank passes its part on, ``"in flight"`` from there to the end
        of the wait, and ``"wait"``, in which it waits for the other ranks and takes the result.
        """
    @property
    def op_index(self) -> int:
        """Index of the op in the program of the rank."""
    @property
    def issued_by(self) -> int | None:
        """Index of the op that issued the collective; ``None`` for compute."""
    @property
    def start(self) -> float:
        """Start in seconds since the ranks were loaded, on the monotonic clock of the host."""
    @property
    def end(self) -> float:
        """End in seconds, on the same clock."""

class SessionTrace:
    """The trace of the calls of a session: the newest 10 000, as long as all ranks together have run at most 500 000 ops in them."""

    @property
    def events(self) -> list[TraceEvent]:
        """The events of all ranks, in order of their start; those of one rank at one instant are in program order."""
    @property
    def record(self) -> SessionRecord:
        """The record of the session when the trace was taken."""
    @property
    def stream_ids(self) -> dict[str, int]:
        """The numbers of the streams, by name."""
    @property
    def clock_errors(self) -> dict[int, float]:
        """By how many seconds the times of a rank may be off beside those of rank 0; empty for the ranks of one host.

        Hosts have clocks of their own. The trace aligns them by what must have come before what: a call begins before its ranks run it,
        and no rank completes a sum before every rank has begun to send its part. The delay with which a host notices that its GPU has
        ended a call is not part of the number.
        """
    def save(self, path: Path) -> None:
        """Writes the trace as JSON for Perfetto and chrome://tracing: a process per rank, and a thread per stream with its number."""
    def _repr_html_(self) -> str: ...

class CallRecord:
    """A completed call of a session."""

    @property
    def number(self) -> int: ...
    @property
    def program(self) -> str: ...
    @property
    def start(self) -> float:
        """Time at which the caller passed the inputs, in seconds since the ranks were loaded."""
    @property
    def end(self) -> float:
        """Time at which the caller got the outputs."""
    @property
    def seconds(self) -> float: ...

class SessionRecord:
    """What a session ran: its plan, its ranks, and its newest 10 000 calls."""

    @property
    def plan_digest(self) -> str: ...
    @property
    def mesh(self) -> str: ...
    @property
    def ranks(self) -> int:
        """Number of ranks."""
    @property
    def place(self) -> str:
        """Where the ranks are: ``"threads"``, ``"processes"`` or ``"joined"``."""
    @property
    def device(self) -> str: ...
    @property
    def calls(self) -> list[CallRecord]:
        """The completed calls, oldest first."""
    @property
    def call_count(self) -> int:
        """Number of all completed calls."""

def open_session(
    plan: Plan,
    *,
    ranks: str = "threads",
    device: str = "cpu",
    threads_per_rank: int = 1,
    out: str | None = None,
    oversubscribe: bool = False,
    trace: bool = False,
    rendezvous: str | None = None,
    secret: Path | None = None,
    join_timeout: float = 300.0,
) -> Session:
    """Loads a plan on ranks that are ``"threads"`` of this process, ``"processes"`` of this host, or ``"joined"`` over hosts.

    Of ``"joined"`` ranks this process starts rank 0 alone, which listens at ``rendezvous``, the host and port of this machine
    as the others reach it, such as ``"head.example:29500"``. ``tessera join`` starts each of the others with its own copy of the plan
    and the weights. ``secret`` is a file of at least 32 bytes that every rank has and that not every user of its host can read; what the
    ranks send is encrypted. On GPUs rank 0 has the first GPU of its host, unless the mesh of the plan names another, and the
    others need ``--device cuda``. Ranks of one host exchange data in peer memory, and those of different hosts over the network.

    ``device`` is ``"cpu"`` or ``"gpu"``. Ranks on GPUs that are threads read arrays in the memory of their GPUs, and their outputs
    stay there. Each rank needs a GPU of its own that has access to the memory of the others. A call of several such ranks waits for other
    calls on GPUs, for copies to GPUs and for loads of this process, and these wait for it; DTensors that are released during it are
    freed after it. Another library must not allocate or free GPU memory on another thread during such a call: the driver may make that
    thread wait for one GPU while it keeps this process from launching on the other. Both then wait until the ranks give up after 300
    seconds. Ranks that are processes take and return arrays in host memory, and have none of these restrictions.

    Processes write the record of the run to the folder ``out``, by default a temporary one that is removed with the session.
    An output that is not finite ends the run, as a drift between ranks does: every later call of the session is refused.

    With ``trace`` each rank times every op, ``Session.trace`` returns the times, and a folder ``out`` gets a ``trace.json``. A GPU
    times its kernels: of ops that share one kernel, one has its time. Its clock is placed on that of the host by the time at which the
    host notices the end of a call. The clocks of joined ranks are aligned, and ``SessionTrace.clock_errors`` states how far they may be off.
    """

def register_prefetch(
    layer: Moe,
    window: int = 2,
    tier_order: Sequence[str] = ("HBM", "Grace"),
    policy: str = "lru_hotness",
    stream: str = "io",
    *,
    resident: int | None = None,
) -> None:
    """Keeps the experts of a layer in host memory and a few of them in fast memory, in the programs that are traced from now on.

    A rank has a pool for ``resident`` experts of each bank, by default for two times the experts of a token: those that it
    uses, and as many that arrive meanwhile. When a layer starts, the stream ``io`` is asked for the experts that
    the registered layer ``window`` layers later will likely use, in this call or in the next one, and for those that this
    layer uses and its pool does not hold. ``policy`` says which are likely, and which leave the pool: ``"lru_hotness"`` counts uses and halves
    a count every 64 calls, ``"lru"`` goes by the last use. Results keep their bits, whatever ``resident`` is.

    The tiers are ``"HBM"`` and ``"Grace"``. On a CPU rank they are its pools, and the host memory that all ranks share. On a GPU they are
    device memory and pinned host memory, which has all experts of the rank. A GPU whose layer uses more experts than its pool has slots
    reads the others in host memory.
    """

class PrefetchReport:
    """What a session did with the experts of registered layers."""

    @property
    def layers(self) -> list[LayerPrefetch]:
        """One entry per call, rank and layer, in this order."""
    @property
    def events(self) -> list[IoEvent]:
        """The transfers of single matrices, by call and rank, in the order in which they ended."""
    @property
    def stalls(self) -> int:
        """Number of experts for whose transfer layers had to wait, because nothing had requested them before."""
    @property
    def hits(self) -> int:
        """Number of used experts that lay in fast memory, or were on their way, when their layer started."""

class LayerPrefetch:
    """What one rank did with the experts of one layer in one call.

    Every number but ``waited_ns`` follows from the routing alone, and not from the speed of transfers.
    """

    @property
    def call(self) -> int:
        """Number of the call, from 1."""
    @property
    def rank(self) -> int: ...
    @property
    def program(self) -> str: ...
    @property
    def layer(self) -> int:
        """Number of the layer among the registered ones of its program, from 0."""
    @property
    def hits(self) -> int:
        """Used experts that lay in fast memory, or were on their way there, when the layer started."""
    @property
    def stalls(self) -> int:
        """Used experts that nothing had requested when the layer started, so that it waited for them."""
    @property
    def prefetches(self) -> int:
        """Experts that were requested ahead of this use of the layer."""
    @property
    def prefetches_used(self) -> int: ...
    @property
    def prefetches_unused(self) -> int: ...
    @property
    def moved_bytes(self) -> int:
        """Bytes of the matrices of all experts that were requested since the use before."""
    @property
    def evicted(self) -> list[int]:
        """Experts that left the pool since the use before, in order."""
    @property
    def waited_ns(self) -> int:
        """Time for which the layer waited for transfers."""

class IoEvent:
    """A transfer of one matrix of an expert."""

    @property
    def rank(self) -> int: ...
    @property
    def call(self) -> int:
        """The call with which the transfer was reported: it may have been requested by the one before."""
    @property
    def stream(self) -> str: ...
    @property
    def stream_id(self) -> int | None:
        """Number of the stream in the plan."""
    @property
    def op(self) -> str:
        """What was moved, such as ``prefetch f.w2 expert 5``."""
    @property
    def start_ns(self) -> int:
        """Begin on the monotonic clock of the host."""
    @property
    def end_ns(self) -> int: ...

class VideoChunk:
    """The frames of one chunk of a stream."""

    @property
    def index(self) -> int:
        """Index of the chunk, from 0."""
    @property
    def frames(self) -> NDArray[np.uint8]:
        """RGB of [frames, height, width, 3]."""

class VideoStream:
    """A running stream: an iterator over its chunks, and a context that ends it.

    Chunks come while the ranks compute the next ones. One chunk waits for a caller that does not take it; the ranks wait
    too, and a run whose frames nobody takes for 45 seconds ends with an error. A change holds from the next chunk that is
    requested, which is a few chunks behind the one that comes next.
    """

    def __iter__(self) -> VideoStream: ...
    def __next__(self) -> VideoChunk: ...
    def send(self, prompt: str) -> int:
        """Replaces the prompt, and returns the number of the change."""
    def reseed(self, seed: int) -> int:
        """Replaces the seed, and returns the number of the change."""
    def choose_steps(self, name: str) -> int:
        """Replaces the list of denoise steps by one that the plan admits: a name of ``[schedule.lists]`` in the model's
        stream.toml, or ``"default"``. Returns the number of the change."""
    def set_bias(self, bias: float) -> int:
        """Replaces the attention bias of the recomputed context, above 0 and at most 1. Returns the number of the change."""
    def set_lora(self, path: Path | None, *, strength: float = 1.0) -> int:
        """Replaces the LoRA by a safetensors file, or by none, before the next requested chunk, which opens a new scene. Returns
        the number of the change."""
    def cut(self) -> int:
        """Opens a new scene, and returns the number of the change."""
    def chunk_of(self, change: int) -> int | None:
        """Returns the first chunk with a change, once that chunk is requested."""
    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
    def close(self) -> None:
        """Ends the stream after the chunks that are under way, and waits for its processes."""
    def __enter__(self) -> VideoStream: ...
    def __exit__(self, *exception: object) -> None: ...

def stream(
    model_folder: Path,
    *,
    prompt: str | None = None,
    seed: int | None = None,
    chunks: int | None = None,
    mesh: str = "tp=1",
    device: str = "cpu",
    out: Path | None = None,
    oversubscribe: bool = False,
) -> VideoStream:
    """Streams a video from a model, on ranks that are processes of this host.

    Without ``chunks`` the stream runs until it is closed. ``mesh`` lists axes and sizes, such as ``"tp=2"``, and ``device`` is
    ``"cpu"`` or ``"gpu"``. A folder ``out`` keeps the clip, the record and the report of the run.
    """

class TextStream(Generic[Piece]):
    """Texts that are being generated: an iterator over their pieces, and a context that ends the run."""

    def __iter__(self) -> TextStream[Piece]: ...
    def __next__(self) -> Piece: ...
    @property
    def text(self) -> str:
        """The whole text of a single prompt, after the end."""
    @property
    def texts(self) -> list[str]:
        """The whole texts in the order of the prompts, after the end."""
    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
    def close(self) -> None:
        """Ends the run after the call that is under way, and waits for its processes."""
    def __enter__(self) -> TextStream[Piece]: ...
    def __exit__(self, *exception: object) -> None: ...

@overload
def generate(
    model_folder: Path,
    prompt: str,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    mesh: str = "tp=1",
    device: str = "cpu",
    oversubscribe: bool = False,
) -> TextStream[str]:
    """Continues a text with a language model, on ranks that are processes of this host, and yields its pieces.

    A ``temperature`` of 0 takes the likeliest token, and larger values make unlikely ones more frequent. With a list of prompts
    the items are pairs: the index of a text, and a piece of it.
    """

@overload
def generate(
    model_folder: Path,
    prompt: list[str] | tuple[str, ...],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    mesh: str = "tp=1",
    device: str = "cpu",
    oversubscribe: bool = False,
) -> TextStream[tuple[int, str]]: ...

def set_stream_map(streams: Mapping[str, int]) -> None:
    """Numbers the streams of the plans that are made from now on, as ``Plan.stream_ids`` and the traces of their sessions show them.

    Without a map ``compute`` is 0, ``tp_collective`` 1, ``a2a`` 2, ``io`` 3 and ``pp`` 4. If a map leaves ``pp`` out, traces give it the
    smallest number that is left.
    """

def enable_overlap(pairs: Sequence[tuple[str, str]]) -> None:
    """States which pairs of streams may run at the same time, in the plans that are made from now on.

    All others are serialised.
    """

def stream_settings() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the numbers of the streams and the pairs that may overlap."""
