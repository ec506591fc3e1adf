//! The diagnostic codes of the arguments of the command line and of the Python package (T15), in order of id.

tessera_base::codes! {
    T0030: "invalid argument value",
    "A change during a stream is written CHUNK:VALUE, where CHUNK counts from 0 and the change takes effect at that \
chunk: `--at 4:'a blue square moves left'`, `--seed-at 4:7`. Steps are numbers in descending order, separated by commas: \
`--steps 1000,750,500,250`. Minimum times are milliseconds: `--min-decode-ms 60,120,15`. A mapping is a TOML file. \
Quote a text that contains spaces; otherwise the shell splits it.";

    T0031: "no model given",
    "A plan needs a model. Name a language model in one of three ways: --model and a name \
of the zoo, --recipe and a preset of model, workload and mapping, or the path of a config.json. \
Name a video model by its folder, which has a config.json and a stream.toml. To stream, the \
folder also needs the weights as safetensors. models/demo is such a folder of this project. \
With --plan, the plan names the model.";

    T0032: "unknown code or name",
    "`tessera explain` knows codes such as T0301, rules such as D-03, drills, pages, topics, explainers, cards, and symptoms in plain \
 words; without a question it lists them. `--pack` takes the name of a prompt pack. A code or rule of another version may have been retired; an id is never reused.";

    T0033: "standard output cannot be written",
    "The output of the subcommand could not be written to standard output, usually because it is redirected to a \
file on a full disk. The work itself was done, and a folder given by --out exists. Redirect the output to another place and run \
the subcommand again with another --out.";

    T0038: "unknown drill, or a self-test of a measurement",
    "`tessera drill --list` prints the drills of this build, with the code, rank and place that each failure must \
report. Give one id or several; without an id, all drills run. A self-test disables the check that a drill tests, so it takes \
no measurement, such as depth-sweep.";

    T1501: "axes and shape of a mesh disagree",
    "`dist.Mesh` takes the axes tp, ep, pp and dp, each at most once and in this order, and a size for each of them. The order is \
fixed because it numbers the ranks: the first axis varies fastest, so with `tp=12, ep=6` ranks 0 to 11 are one tp group and rank \
12 is the first of the next. `mesh.coord(rank)` and `mesh.rank(tp=…, ep=…)` convert between the two.";

    T1502: "array cannot be distributed",
    "Programs of arrays take float32. Other dtypes are not converted silently, because a conversion costs time and may lose digits: \
write `array.astype(numpy.float32)`. Every dim has a name, by which a ShardSpec finds it: those of a weight are `col` and `row` by \
default, and `experts`, `col`, `row` for a bank of experts. Name others with `dims=`, and with `units=` how many elements \
of a dim stay together.";

    T1503: "layer cannot be made",
    "A layer was given an argument that no backend computes: an unknown gate, activation or regularizer, more experts per token than \
there are, or three dots in the place of arguments. The message names the argument, and the hint what is possible.";

    T1504: "values do not belong to this program",
    "`graph.trace` calls a function once with symbolic values, and the ops that it calls become the program. The function may use \
arrays from outside, which become weights, but no values of another trace, and no arrays of another mesh. It returns values that \
ops returned: numbers and numpy arrays are known before the program runs and do not depend on its inputs.";

    T1505: "precision policy does not exist",
    "`op.numeric` has the dtypes f32, bf16 and fp8_e4m3. Matmuls add in f32 under each of them, and a program has one of them. Values of fp8_e4m3 have one scale per row \
of a matrix, which `scale=\"per_channel\"` may state. Rounding is to the nearest value, ties to even, or with `stochastic_round=True` to one of the two \
neighbours. Only that draws numbers, so only there a `seed` from 0 to 2^40 may be stated, and it needs a dtype below f32.";

    T1506: "streams cannot be numbered like this",
    "`set_stream_map` numbers each of the streams compute, tp_collective, a2a and io once; pp may be left out. The numbers identify \
streams in traces, so two streams cannot share one. `enable_overlap` takes pairs of these names: a pair that is not listed is \
serialised, in the plan and in every run of it.";

    T1507: "cost of a router failed",
    "A router calls `meta.apply(cost)`, which calls the function for every expert and every group of tokens while the program is \
traced. The function raised an exception, or returned no number. The message names the expert and the first token of the group; the \
exception itself is the cause of this one.";

    T1508: "search cannot be asked like this",
    "`graph.search` plans a model of the zoo, or of a config.json, on a machine of the catalog. Its objective is throughput, latency or \
memory. Pins are the knobs of `tessera plan --pin`, written as keywords: `search(\"deepseek-v3\", tp=8)`.\n\n\
`compile` of a traced function takes the same objectives: with a cluster and without a mesh, it plans the function for the best mesh of \
the cluster. An objective needs a cluster, `why` compares meshes on the cluster of the plan, and a mesh has one rank for each device, so \
a number of devices is stated only without one.";

    T1509: "experts cannot be registered for prefetch",
    "`runtime.register_prefetch` keeps the experts of a layer in host memory and `resident` of them in fast memory. It takes what \
`op.moe` returns, a window of at least one layer, the tiers HBM and Grace in this order, a policy (lru or lru_hotness), the stream \
io, and 1 expert up to all. It holds for the programs that are traced afterwards, because a plan states its tiers: register the layer \
before the first trace. In a program the experts are arrays from outside of the function, since inputs come with each call, and the \
program uses them once.";

    T1510: "mesh lacks an axis of the program",
    "A traced function names the axes that shard its arrays, and runs on every mesh that has them, whatever their sizes. On a mesh without \
one of them the arrays would stay whole on every rank without a word, and each rank would need their full memory.\n\n\
Name the axis in the mesh. With size 1 its arrays stay whole, and the mesh says so.";
}
