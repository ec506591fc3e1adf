//! The diagnostic codes of this crate, in order of id.

use tessera_base::Code;

/// All codes of this crate, for the registry of the binary.
pub const CODES: &[&Code] = &[&T0046, &T0047, &T0051, &T0056];

/// The cluster, the profile or the gate limits of an estimate cannot be read.
pub static T0046: Code = Code {
    id: "T0046",
    title: "cluster, profile or limits cannot be read",
    page: "A cluster, an executor profile or a set of gate limits is given by a catalog name or by the path of a TOML file. The \
argument is no catalog name, and no file can be read at that path. `tessera measure` writes a cluster and a profile for \
this machine. Both files may be edited: every figure names its source.",
};

/// The model to estimate is not known.
pub static T0047: Code = Code {
    id: "T0047",
    title: "unknown model",
    page: "A model is given by a folder with a config.json, by the path of that file, or by a name of the zoo, which the message \
lists. A language model needs only config.json; a video model also needs stream.toml, which defines how it is streamed.",
};

/// Reported for a folder without a recorded run, a sealed plan or an estimate.
pub static T0051: Code = Code {
    id: "T0051",
    title: "folder contains nothing to examine",
    page: "The doctor examines three kinds of folders: a run folder of `tessera stream --out` \
with record.jsonl and the plan that ran, a sealed plan with seal.json, and a folder of `tessera \
plan --out` whose estimate.json contains the query (the model and the options of that \
estimate). This folder is none of them, or its content cannot be read. An estimate.json of an \
older build does not contain the query: plan again.",
};

/// A prefetch hit rate was given for a model or a job that fetches no experts.
pub static T0056: Code = Code {
    id: "T0056",
    title: "prefetch hit rate does not apply",
    page: "A prefetch hit rate is the share of the host-memory experts that a predictor names one layer before the router selects \
them: 0 means no predictor, 1 a perfect one. Predicted experts are fetched while the previous layer computes; the others are \
fetched while their own layer waits.\n\nA prefetch hit rate only applies to a model with routed experts in prefill or decode: training keeps \
all experts in device memory, and a dense model fetches none. Omit it in these cases. The share must be from 0 to 1.",
};
