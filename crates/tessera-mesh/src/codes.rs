//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0101: "unknown mesh axis",
    "A mesh has at most four axes: tp (shards weights, heads or tokens), ep (shards experts), pp (layer \
blocks as stages) and dp (replicas). Sequence parallelism is not a fifth axis: it is a strategy over tp.\n\n\
Write the mesh as name=size pairs, for example `--mesh tp=2,pp=2`.";

    T0102: "mesh text cannot be read",
    "A mesh is a comma-separated list of axis=size pairs. Each axis appears at most once, and each size is an integer of at \
least 1: `tp=2`, `tp=2,pp=3`. Axes that are not listed have size 1.\n\n\
`outside=N` next to the axes adds N ranks outside the mesh, such as a leader that runs the text encoder and the decoder while \
the mesh generates. They come first in rank order: with `tp=2,outside=1`, rank 0 is outside the mesh, and ranks 1 and 2 have \
the positions 0 and 1 on the axis tp.";

    T0103: "device list does not fit the mesh",
    "The rank map assigns one device to every rank, in rank order. A rank with the \
positions tp, ep, pp and dp on axes of the sizes TP, EP, PP and DP has the number tp + TP·(ep + \
EP·(pp + PP·dp)), so tp varies fastest. Ranks outside the mesh come first. The list must have \
exactly one entry per rank and must not repeat a device.";

    T0104: "mesh is too large",
    "The axis sizes multiply to the ranks of the mesh; the ranks outside the mesh are added to them. Tessera plans for \
at most 65,536 ranks; a larger number is assumed to be a mistake.";

    T0105: "unknown dim name",
    "The dims of a weight are named after the effect of sharding them: `col` is the \
output features (each rank computes some columns of the result), `row` is the input features \
(each rank computes one term of a sum), `experts` is the first dim of an expert bank. Other tensors \
have dims called `head`, `batch`, `token`, `vocab`, `hidden` and `depth`. Other \
names are rejected, because a matmul whose weight is sharded over the wrong dim still runs, \
with wrong results. For the same reason a spec may only name dims that its tensor has.";

    T0106: "shard spec does not pair names and axes",
    "A shard spec is two lists of equal length: `(\"col\",)` and `(\"tp\",)` shard the output features over tp. \
The first axis shards the first dim, and so on. A dim is sharded over one axis at most, and an axis shards one dim of a tensor at \
most, because no collective exchanges shards of two axes at once. So no name occurs twice in either list.";

    T0107: "dim cannot be sharded over this axis",
    "Every rank of an axis holds at least one element of a dim that the axis shards. Shards may differ by one: 128 heads over \
tp=12 are 11 for eight ranks and 10 for four. An extent below the size of the axis would leave a rank with nothing. \
Use a smaller axis, or leave the dim whole.";

    T1101: "device counts of the cluster contradict each other",
    "A cluster consists of racks of hosts of devices, divided into switch domains. A domain is part of a host, one host, or \
several whole hosts of one rack. So its size must divide the devices per host, or be a multiple of them and divide \
the devices per rack. The devices per socket must divide the devices per host.\n\n\
For a rack that is one domain set `domain` to `hosts_per_rack` times `devices_per_host`; for hosts without a \
switch between devices set `domain = 1`. More than 65,536 devices are assumed to be a mistake.";

    T1102: "figure of the cluster is out of range",
    "Rates, sizes and peaks are above 0, except that `host.bytes` is 0 where devices have no second tier of memory. \
Latencies are at least 0, and `achievable` is a fraction of the line rate from 0 to 1. Units are bytes, bytes per second, operations per second and nanoseconds: 450 GB/s is `450e9`. \
Each figure names its source, because an estimate is only as good as its inputs; write `a guess` if it is one.";

    T1103: "links or peaks of the cluster are in an implausible order",
    "Links within a domain must be at least as good as links between domains, in rate and in latency: the mapping search \
places groups with much traffic within a domain, which would be wrong for a cluster whose domains are slower. If the \
devices of a host really have nothing better than the network, write `domain = 1` with equal figures.\n\n\
A narrower number format must not have a lower peak than a wider one: omit the peak if the device has no units for \
the format.";

    T1104: "unknown cluster",
    "A cluster is a name from the catalog or the path of a TOML file. `tessera measure` \
writes such a file for the current machine. To describe a machine that you do not have, copy \
the closest file of crates/tessera-mesh/clusters, edit its figures and pass the path of the \
copy. Several racks of one cluster need no file of their own: give --devices a larger number \
than one rack has.";
}
