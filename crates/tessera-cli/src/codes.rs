//! The diagnostic codes of this binary, in order of id.

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
}
