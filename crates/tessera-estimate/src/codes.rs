//! The diagnostic codes of this crate, in order of id.

tessera_base::codes! {
    T0046: "cluster, profile or limits cannot be read",
    "A cluster, an executor profile or a set of gate limits is given by a catalog name or by the path of a TOML file. The \
argument is no catalog name, and no file can be read at that path. `tessera measure` writes a cluster and a profile for \
this machine. Both files may be edited: every figure names its source.";

    T0047: "unknown model",
    "A model is given by a folder with a config.json, by the path of that file, or by a name of the zoo, which the message \
lists. A language model needs only config.json; a video model also needs stream.toml, which defines how it is streamed.";

    T0051: "folder contains nothing to examine",
    "The doctor examines four kinds of folders: a run folder of `tessera stream --out` \
with record.jsonl and the plan that ran, a sealed plan with seal.json, a folder of `tessera \
plan --out` whose estimate.json contains the query (the model and the options of that \
estimate), and the folder of TORCH_TRACE with the compile traces of a PyTorch run. This folder is none of them, or its content cannot be read. An estimate.json of an \
older build does not contain the query: plan again.";

    T0056: "prefetch hit rate does not apply",
    "A prefetch hit rate is the share of the host-memory experts that a predictor names one layer before the router selects \
them: 0 means no predictor, 1 a perfect one. Predicted experts are fetched while the previous layer computes; the others are \
fetched while their own layer waits.\n\nA prefetch hit rate only applies to a model with routed experts in prefill or decode: training keeps \
all experts in device memory, and a dense model fetches none. Omit it in these cases. The share must be from 0 to 1.";

    T1242: "no mesh fits an array program",
    "A search estimates an array program on every mesh of its axes that has one rank for each device, and none of them is legal. The notes \
count the reasons: an axis has more ranks than a dim has elements or heads, the program contains the size of an axis as a number, \
or a rank needs more memory than a device has.\n\n\
State fewer devices, because a small program cannot be divided over a rack, or a mesh of your own. Layouts over another axis also change \
which meshes are legal.";
}
