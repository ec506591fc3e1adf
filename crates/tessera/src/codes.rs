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

    T0027: "noise file cannot be used",
    "`--noise FILE` gives the noise of each chunk's first denoising step. The file is a safetensors file with one tensor \
`noise`, whose first dim counts the chunks of the stream. The other dims are the tokens of a chunk as programs read them, [tokens, width] or \
[frames, rows, columns, patch rows, patch columns, channels], or the latents as other programs hold them, [channels, frames, height, width]. \
The message has the shape in the file and those that the model takes. A file may have more chunks than the stream, but not fewer.\n\n\
The guide `outputs` shows how to write such a file.";

    T0034: "inconsistent rank environment",
    "`tessera stream` is one process of a run that an external launcher started if the launcher's variables are set: RANK and \
WORLD_SIZE (torchrun, or a script of your own), OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (MPICH), SLURM_PROCID with SLURM_STEP_ID \
(srun), LWS_WORKER_INDEX (LeaderWorkerSet). If several are set, the first of this list counts. The variables must be whole numbers, \
complete, and consistent: an index below its count, as many hosts in the list as the step has, consecutive tasks on a host. \
MASTER_ADDR and MASTER_PORT say where rank 0 listens; only Slurm and LeaderWorkerSet state its host by themselves. \
A secret or certificates must be given, because the ranks' connections are open to the network. \
Ranks of array programs join in the same way, with `tessera join` and without variables: the Python session is rank 0.\n\n\
To start all ranks on this host instead, unset the variables that the message names.";

    T0035: "credentials file cannot be used",
    "The secret of a run is a file of 32 bytes or more that every rank reads (`--secret FILE`), for instance from \
`head -c 32 /dev/urandom`. Certificates come as three PEM files: this rank's certificate, its key, and the certificate of the \
authority that all ranks trust (`--tls-cert`, `--tls-key`, `--tls-ca`); give all three or none. A secret or a key that every \
user of the host can read is rejected: `chmod 600` it.";

    T0040: "option does not apply to this device",
    "With --device sim a plan runs on a simulated machine: only time is simulated, \
nothing is computed. So there are no frames to write as PNGs and no weights to load. The simulated machine also determines how long each forward takes, so \
--min-generate-ms does not apply. --cluster and --profile describe the simulated machine, so \
they require --device sim. The message names the option and the one that it contradicts; omit \
one of the two.";

    T0041: "weights differ from those that the plan pins",
    "`tessera plan --pin-weights` puts a digest of all weights into the mapping, which the seal covers. Such a plan \
runs with these weights alone. The files of this model have another digest, so no rank was started.\n\n\
The digest covers the name, dtype, shape and every element of every tensor. It depends neither on the mesh, nor on the \
files' naming style, nor on how many files hold the tensors. Use the checkpoint for which the plan was made, or plan again.";

    T0042: "reader of the frames stalls",
    "`tessera stream` writes uncompressed frames to a pipe (--raw, --y4m), and the program at the other end has taken \
no byte for three quarters of the time that the media pipeline has for an answer. Frames wait for their reader, chunks wait for the frames, and the wait of a \
stream has a limit: the run ended and kept its folder.\n\nFind out what the reader waits for: a paused player, an encoder slower than its input, a full disk. \
A program that must pause can read from a file: `--raw frames.rgb`.";

    T0043: "reader of the frames closed its pipe",
    "`tessera stream` writes uncompressed frames to a pipe (--raw, --y4m), and the program at the other end closed it before \
the stream was over. The message states how many frames it received. Chunks delivered before are complete in the run folder.\n\n\
Look at the messages of that program: a player that was closed, or an encoder that rejected the size or the format of the frames. The guide \
`outputs` has command lines that work.";

    T0044: "frames cannot go to this destination",
    "--raw and --y4m take a new file, a named pipe, `-` for standard output, or `fd:N` for a file descriptor that the command \
inherits. The descriptor is not open for writing, or standard output is a terminal, which uncompressed frames would fill with control characters. Pipe \
the command into a program, or name a file.";

    T0054: "plan does not admit this setting",
    "A stream may change its list of denoise steps and the attention bias of its context at chunk boundaries, to values that its plan \
admits. The lists are `schedule.steps`, by the name `default`, and those of `[schedule.lists]` in stream.toml; all of them are \
part of the seal, and every rank compares the noise levels and timesteps of each call with the list that the call names. A bias is \
above 0 and at most 1, and only programs of the recompute regime read one.";

    T0058: "rows of a prompt are missing or do not fit",
    "With `encoder = \"file\"` in stream.toml, or with --text-embeddings, another program has encoded the prompts. The file is \
safetensors; the name of a tensor is a prompt, letter by letter, and the tensor holds its rows: at most text_len of them, each \
of text_dim columns (config.json). Shorter prompts are padded with zero rows, as the text encoder of Wan does. The message \
names the prompt that is missing, or shows both shapes.";

    T0067: "two launchers contradict each other",
    "The variables of two launchers are set, both for the same number of processes, and they give this process two indices. One of \
them is then stale or set by mistake, for instance RANK=0 exported in a batch script whose tasks `srun` numbers itself. The run does \
not start, because two processes with one rank would meet at rank 0.\n\n\
Unset the variables of one launcher. A launcher inside another one, such as torchrun under srun with several processes on each \
host, has another number of processes and is no contradiction.";

    T0068: "ranks cannot be divided among the processes of a launcher",
    "A launcher starts either one process per rank or one process per host. With one per rank, the plan must have as many ranks as \
there are processes. With one per host, every host gets the same number of ranks of the mesh, and ranks outside the mesh run on the \
first host besides. So 72 ranks need 72 processes, or one process on each of 1, 2, 3, 4, 6, 8, 9, 12, 18, 24 or 36 hosts.\n\n\
Change the mesh, the number of processes or the number of hosts. The guide `launchers` shows a command line for each launcher.";

    T0069: "a group does not use the peer memory that its plan states",
    "The plan states that all members of this group are on one host, so that their GPUs read and write one another's memory. The GPU \
backend found that they cannot, and would use NCCL, with which a collective takes several times as long. The rank stops before the \
first call and reports each such group with the reason that the backend found: a GPU without peer access, a process that does not see \
all GPUs of its host, or a container in which processes cannot share memory.\n\n\
Remove the reason; `tessera doctor` shows which GPUs reach each other. If you want NCCL on this host, plan with \
`--transport nccl`. A plan without `--hosts` states no paths, and nothing is compared: the record then shows which transport each \
group used.";

    T0070: "a part of the checkpoint is missing",
    "A video model has four parts: the generator, the VAE, the text encoder and the tokenizer. Tessera looks for the names \
under which they are published: those of the original Wan release (Wan2.1_VAE.pth, models_t5_umt5-xxl-enc-bf16.pth, \
google/umt5-xxl/) and those of a diffusers pipeline (vae/, text_encoder/, tokenizer/). Distilled checkpoints contain the \
generator alone, and share the other parts with Wan2.1; these are also looked up in folders Wan2.1-T2V-* and wan_models \
below the checkpoint and beside it.\n\n\
`tessera models inspect FOLDER` lists what was found where, and what is missing.";

    T0071: "download is incomplete",
    "The folder holds files that a download program has not renamed to their final names yet (*.incomplete, *.part, \
*.aria2, *.crdownload), and a part that the run needs is not there. The download was interrupted or still runs.\n\n\
Run the same download command again: it continues where it stopped. A part whose files are complete is used although other \
files of the folder are not.";

    T0072: "model was not distilled for streaming",
    "Wan2.1 as it was released denoises all frames of a clip together, and every frame attends to later ones. A stream \
generates chunk by chunk, and a chunk cannot attend to frames that do not exist yet. The tensors have the same names and \
shapes, so a run would end without an error and show noise or frozen pictures.\n\n\
Use a checkpoint that was trained for causal chunks: Self-Forcing, LongLive or StreamDiffusionV2 for 1.3B, Krea Realtime for \
14B. The released folder still provides their VAE, text encoder and tokenizer.\n\n\
A folder counts as released if it is a full Wan folder or a diffusers pipeline whose config does not name a causal class \
(CausalWanModel and similar). If its weights were replaced by causal ones, say so by a stream.toml in the folder or by \
`--stream FILE`.";

    T0073: "checkpoint is image-to-video",
    "An image-to-video model takes the first picture as an input: its patch embedding has 36 channels instead of 16, and \
layers named img_emb or image_embedder encode the picture. A stream has no such input.\n\n\
Use the text-to-video checkpoint (T2V) of the same family.";

    T0074: "VAE belongs to Wan2.2",
    "The VAE of Wan2.2 compresses 16 by 16 pixels to a cell of 48 channels, and that of Wan2.1 compresses 8 by 8 pixels to \
a cell of 16. Generators distilled from Wan2.1 produce latents of 16 channels, which only the VAE of Wan2.1 decodes.\n\n\
Use Wan2.1_VAE.pth, or the folder vae/ of a Wan2.1 pipeline.";

    T0075: "checkpoint is an adapter",
    "The file holds factors of low rank (LoRA) that are added to the weights of a base model. Alone they are no model.\n\n\
Name the base, and add the adapter with `--lora FILE`, with the strength that its publisher states as `--lora FILE:STRENGTH`. \
LongLive is published as a base and an adapter: without the adapter it generates, but drifts after a minute.";

    T0076: "model has no stream settings",
    "A published checkpoint states its dimensions and not how it is streamed: picture size, frames per chunk, cache window, \
denoising steps. Tessera does not guess them, because a wrong schedule produces plausible but poor pictures.\n\n\
Name a preset with `--preset`, or write a stream.toml into the folder, or name one with `--stream FILE`. A stream.toml may \
begin with preset = \"self-forcing\" and state only what differs. `tessera models inspect FOLDER` shows the presets that fit.";

    T0077: "several checkpoints in one folder",
    "The folder holds several files with weights, and none has a usual name (diffusion_pytorch_model or model). They may be \
two precisions of one model or two models, so Tessera does not choose. Name the file itself instead of the folder.";

    T0078: "encoder of the leader runs on the CPU",
    "The ranks run on GPUs and an encoder of the leader does not: its GPU has no memory for it beside what else runs there, or no \
kernel for an op of it. On the CPU a prompt takes seconds where a GPU takes milliseconds, and only chunks with a new prompt wait \
for it. The frames of an input video can take minutes per chunk, and every chunk waits for them.\n\n\
`--text-unload` does not help, because the weights must fit while a prompt is encoded. Use more GPUs, so that each \
rank holds less, or a leader outside of the mesh (`--topology pp1`) with a GPU that no rank has. With `--media outside` an input \
video is encoded on the GPU that decodes. `--text-on cpu` and `--video-on cpu` choose the CPU without this note, and `--text-on gpu` \
and `--video-on gpu` refuse to run without a GPU.";

    T0079: "input video cannot be used",
    "`--video PATH` gives the frames from which a stream begins each chunk: a folder of PNGs in the order of their names, or a \
file or named pipe of 8-bit RGB without a header, or of YUV4MPEG2 in 4:4:4 or 4:2:0. Size and frame rate must be those of the \
stream, because Tessera neither scales nor drops frames. The first chunk of a scene takes one frame for its first latent, and \
all other latents take a group of frames each.\n\n\
The message names what differs and the nearest size. `--video-strength` must admit at least one denoising step: the stream \
begins at the first step whose noise level is at most the strength, which `--video-motion` lowers by up to 0.1. The guide `video-to-video` shows how to convert a video.";

    T0080: "checkpoint is a tiny decoder",
    "The file holds a tiny decoder (TAEHV): it turns latents into pixels and generates none. It takes the place of the decoder of \
the VAE, whose pixels it approximates with a small part of the work.\n\n\
Name a generator, and decode with this file: `--decoder FILE`, or `[decoder] kind = \"tiny\"` and `file` in stream.toml.";

    T0081: "tiny decoder belongs to another model",
    "Tiny decoders of several models have tensors of equal names and shapes, and the latents that they decode differ: another \
model's decoder shows wrong colours and shapes, and no error. The files are told apart by the names under which they are \
published: taew2_1 is that of Wan2.1 and of the models distilled from it; taehv and lighttaehy are those of HunyuanVideo, taehv1_5 \
that of HunyuanVideo 1.5, taeos1_3 that of Open-Sora 1.3, and taecvx that of CogVideoX. lighttaew2_1 decodes latents of Wan2.1 before the mean and the standard deviation are removed, which a generator never \
makes.\n\n\
Use taew2_1.pth. If the file is a decoder that you trained for Wan2.1 yourself, give it another name.";

    T0085: "fast decoder differs too much",
    "With `quality = \"fast\"` the large convolutions of the VAE's decoder run in fp8. At the start of every scene the \
first frame is decoded exactly too, and the two are compared: their peak signal-to-noise ratio (PSNR) stands in the \
summary of the run and as `decoder_psnr_db` in its record. A ratio below 30 dB, which is visible, ends the run. The \
weights of this VAE then have a range that fp8 does not represent well: decode with `--quality exact`.";

    T0086: "text does not fit the plan of a language model",
    "A plan of a language model fixes every shape: the number of texts that are generated at once, and the positions of the KV \
caches, which a prompt and what follows it share. A text needs a prompt of at least one id, room for at least one more, and a \
seed below 2^24. The model itself ends at `max_position_embeddings` of its config.json.\n\n\
Shorten the prompt, or lower `--max-tokens`.";

    T0087: "rank of an in-process run failed",
    "A rank could not finish a call, or two ranks that must agree returned other ids. The message names the rank, the call and \
the program; a note gives the code of the check that ended it. The caches of the run hold a part of the call, so it does not \
continue.\n\n\
Run it again. Ranks that differ twice with the same call point to a defect of this program or of the host's memory: keep the \
command and the model.";

    T0088: "precision policy changes nothing on this mapping",
    "`tessera parity` compares two precision policies: f32, bf16, fp8 and fp8-wire. Under fp8-wire all values are f32, and tokens \
travel to the ranks of their experts as e4m3. On one rank of ep, or in a model without experts, no token travels, and both sides of the \
comparison would compute the same bits.\n\n\
Share the experts over several ranks with `--mesh ep=2`, or compare bf16 or fp8.";

    T0089: "logits in low precision differ too much",
    "`tessera parity` runs the same ids under two precision policies and limits the mean squared error of the logits, \
after both are divided by the standard deviation of the reference's logits. The limits are the keys of `[parity]` in \
crates/tessera-plan/gates.toml, one for each policy; `--gates` names a file with others.\n\n\
Look at the share of positions with the same likeliest id, and at the GEMMs that the command lists. A model whose logits fail in fp8 \
and pass in bf16 has weights or activations with outliers: run it with `--dtype bf16`. A model that fails in bf16 too may have been \
trained in a range that bf16 does not represent well, or a checkpoint may be damaged. A higher limit is a decision for one use: set it \
in a file of your own.";

    T0090: "plan of array programs cannot run",
    "A call of an array program runs one program with whole arrays as inputs, and returns whole arrays. Each rank copies its \
shards out of the inputs and the weights, and the shards of the outputs are assembled. So a program has no buffers and no scalars but those whose numbers the plan states, reads its weights as \
they are, and returns at least one array, in one layout on all ranks. Each call of the bundle \
runs the program of its own name.\n\n\
Between processes, the arrays of a call are one message, which has a limit. Arrays that do not change from call to call are weights, \
which have none.\n\n\
The message names the program and the array, or the limit.";

    T0091: "arrays do not fit the programs of a plan",
    "A plan fixes the names and the whole shapes of the weights, and of the inputs of each program. A call passes exactly the inputs \
of its program, and a run is loaded with exactly the weights of its plan. The message names the array that is missing, unknown or of \
another shape, and shows both shapes: those of whole arrays, not of shards.\n\n\
Nothing was started, and a run that refused a call takes the next one.";

    T0092: "run of array programs has ended",
    "A run takes no further call after a rank has failed, or after an interrupt. The failure itself has the code of the check \
that found it, and the call that waited then returned it; later calls repeat it in a note. This code also stands for the end of the socket \
between the launching process and the leader.\n\n\
A program keeps no state between calls, so nothing is lost: load the plan again, and repeat the call.";

    T0093: "change of a running stream was refused",
    "A stream that runs takes changes from the process that started it: of its prompt, seed, denoise steps, context bias or weights, and cuts. The leader takes the changes that \
have arrived when it requests the next chunk. A prompt may have 4096 bytes, and 16 changes may wait for the next request: more would \
replace one another before any of them has an effect. After the last chunk is requested, and after the run has ended, no change can \
have an effect.\n\n\
The stream continues as it was. This code also stands for bytes on the socket that are no change, and these end the run.";

    T0094: "live run has ended",
    "The process that started a run takes its chunks or its pieces of text while the ranks compute the next ones. The run has failed. Its \
message says which rank ended it and why, and the folder of the run holds the record and the flight records, which `tessera autopsy` reads.";

    T0095: "file of prompts cannot be used",
    "`tessera generate --prompts FILE` reads JSON lines: an object per line, with `prompt` (a text) or `prompt_ids` (a list of ids), \
and if you like `kind`, a label of your own such as code, chat or French. The file is missing or has no such line, or the named line is \
no JSON object, has another key, or has both or neither of the first two. With `--chat` every line needs `prompt`, because a template \
takes texts. Empty lines are skipped. Every wrong line is listed, and nothing was run.";

    T0096: "function of arrays cannot be read",
    "A saved function of arrays is a folder: program.tir has the text of its logical program, function.json says how each array is \
sharded, over which mesh it was traced, and what its call scalars hold, and weights.safetensors has the weights. The message names \
the file and the entry that is no part of such a folder, or does not fit the program: a name that the program does not have, a dim that \
a tensor does not have, or other outputs.\n\n\
A text of a program alone is read too. It says nothing of layouts, so its arrays are replicated until you state others, and it must be \
logical: a program of a role belongs to a plan.";

    T0097: "function of arrays does not move to this mesh",
    "A function that was traced over one mesh runs on another one of the same axes: its layouts name axes and dims, and no \
sizes. Some programs contain the size of an axis as a number. A router that is penalised by the distance of experts knows which rank of \
ep has which expert, and on another number of ranks its numbers would describe a mesh that does not exist.\n\n\
Trace the function again over a mesh of the size that you want. A layout of subgroups, or of terms of a sum, belongs to one mesh as well.";

    T0098: "ranks on GPUs cannot be threads of one process",
    "A session with `ranks=\"threads\"` and `device=\"gpu\"` loads its plan in this process, so that torch and jax pass it arrays in GPU \
memory without a copy through the host. Its ranks exchange data in each other's memory, so every GPU must be able to access the \
memory of every other one, and no collective of the plan may request NCCL, which connects processes. The message names the two \
GPUs, or the collective; `tessera doctor` lists which GPUs have access to which.\n\n\
Start the ranks as processes, with arrays in host memory; or give the mesh GPUs that have access to each other, by `devices=` or \
`CUDA_VISIBLE_DEVICES`.";

    T0099: "array in GPU memory does not fit its use",
    "Arrays in GPU memory stay where they are until someone copies them by name. Ranks on CPUs and ranks of other processes do not read them, ops \
on arrays and weights of plans take host memory, and numpy reads none of them: call `gather()`, which copies an array to the host. \
A session with `ranks=\"threads\"` and `device=\"gpu\"` reads those of which each rank's GPU has the whole array, or the shard that the rank reads.\n\n\
A tensor of another library is distributed by copies of runs of neighbouring elements, so a transposed one must be made contiguous \
first. `copy=False` refuses a shard that would need a copy. The message names the array and the GPUs.";
}
