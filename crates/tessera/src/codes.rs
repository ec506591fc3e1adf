//! The diagnostic codes of this crate, in order of id.

tessera_base::codes! {
    T0010: "no model in this folder",
    "A model is a folder with config.json (the model's own), stream.toml (streaming settings) and weights as \
safetensors. The folder, one of these two files, or the vocab.txt of a word-table text encoder is missing or cannot be read. The demo model is in models/demo.";

    T0011: "plan folder cannot be used",
    "A plan folder holds mapping.toml, the model's config.json and stream.toml, one .tir text per phase and role, \
memory.json and seal.json. One of these files is missing, unreadable or inconsistent with the others. Make the plan again \
with `tessera plan`.";

    T0012: "plan differs from its seal",
    "seal.json holds the digest of the whole plan at the time it was made. The current contents have another \
digest: a program, the mapping or the memory plan was edited, or the folder mixes two plans. `tessera check` verifies a \
single program of the folder as it is; to run an edited plan, plan again so that it is sealed.";

    T0013: "output folder exists",
    "Tessera never overwrites output, and the output folder already exists. Name another folder, or move this one away.";

    T0014: "output cannot be written",
    "The operating system refused to create or write a file: no space left, no permission, or a read-only file system. \
A plan folder appears complete or not at all. A run directory keeps everything written before the error, and its record \
states how the run ended.";

    T0015: "mesh is larger than this machine",
    "Each rank is a process that computes; if there are more ranks than cores, ranks share cores and run slower than fewer would. \
A leader outside the mesh only encodes and decodes and is not counted. Use a smaller mesh, or pass --oversubscribe, for instance to try a plan for another machine.";

    T0016: "model lacks a component that streaming needs",
    "A model without a text encoder can be planned and checked, but it cannot encode a \
prompt. With `--cache recompute` the model also needs a decoder, because the leader then \
decodes a frame of each chunk and encodes it again as context of the next chunk. stream.toml \
names the components: add the missing one.";

    T0017: "shared memory for collectives cannot be set up",
    "The ranks of one host exchange data through anonymous shared memory. Each group of \
ranks has a block of it (an arena), and so has each pair of sender and receiver. The operating \
system refused to create or map an arena, or a rank received an arena that does not match its \
plan. The usual cause is a memory limit of the container.";

    T0018: "stream options contradict each other",
    "The options request something impossible: no chunks at all, a chunk that is both cut and flushed, more chunks than a simulation can hold, or a change at a chunk that the stream never \
reaches. Chunks are counted from 0; a change at chunk N takes effect when chunk N begins.";

    T0025: "program file cannot be read",
    "A program file is UTF-8 text, usually named .tir, and contains one or more programs. The operating system refused to \
    open this file, or it contains something else or nothing. To check a whole plan, name the plan's folder instead.";

    T0026: "ranks of a phase were not compared",
    "Tessera verifies the programs of a file across ranks only if every rank of their \
mesh runs one of them. Here a rank has no role, or a role has no rank, so each program was \
verified alone: the ranks may still deadlock.\n\n\
The name of a role determines its ranks. `role(a)` is every rank of the mesh. `role(a@tp1)` is \
the ranks from position 1 of tp up to the position at which the next role that names tp begins. \
`role(a@out0)` is, in the same way, the ranks outside the mesh from the first of them on; these \
ranks have no other role. A comment at the head of the file can list the ranks instead: `// \
ranks a: 0 3`.\n\n\
Put the programs of all roles into one file. For a plan, name the plan's folder, which lists \
the ranks of each role.";

    T0034: "inconsistent rank environment",
    "With RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, `tessera stream` is one rank of a run that an external \
launcher started, such as torchrun, Slurm or a shell on each host. All four are required: whole numbers with RANK below \
WORLD_SIZE, and the address and port where rank 0 listens. The plan must have exactly WORLD_SIZE ranks, and a secret or \
certificates must be given, because the ranks' connections are open to the network.\n\nTo start all ranks on this host instead, unset the four variables.";

    T0035: "credentials file cannot be used",
    "The secret of a run is a file of 32 bytes or more that every rank reads (`--secret FILE`), for instance from \
`head -c 32 /dev/urandom`. Certificates come as three PEM files: this rank's certificate, its key, and the certificate of the \
authority that all ranks trust (`--tls-cert`, `--tls-key`, `--tls-ca`); give all three or none. A secret or a key that every \
user of the host can read is rejected: `chmod 600` it.";

    T0040: "option does not apply to this device",
    "With --device sim a plan runs on a simulated machine: only time is simulated, \
nothing is computed. So there are no frames to write as PNGs, no weights to load and no other \
processes to join. The simulated machine also determines how long each forward takes, so \
--min-generate-ms does not apply. --cluster and --profile describe the simulated machine, so \
they require --device sim. The message names the option and the one that it contradicts; omit \
one of the two.";

    T0041: "weights differ from those that the plan pins",
    "`tessera plan --pin-weights` puts a digest of all weights into the mapping, which the seal covers. Such a plan \
runs with these weights alone. The files of this model have another digest, so no rank was started.\n\n\
The digest covers the name, dtype, shape and every element of every tensor. It depends neither on the mesh, nor on the \
files' naming style, nor on how many files hold the tensors. Use the checkpoint for which the plan was made, or plan again.";

    T0058: "rows of a prompt are missing or do not fit",
    "With `encoder = \"file\"` in stream.toml, or with --text-embeddings, another program has encoded the prompts. The file is \
safetensors; the name of a tensor is a prompt, letter by letter, and the tensor holds its rows: at most text_len of them, each \
of text_dim columns (config.json). Shorter prompts are padded with zero rows, as the text encoder of Wan does. The message \
names the prompt that is missing, or shows both shapes.";
}
