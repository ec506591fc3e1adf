//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0501: "weights not found",
    "A model's folder contains its weights as `model.safetensors`, or as shards listed in \
`model.safetensors.index.json`, or under the same two names with the stem `diffusion_pytorch_model`. Otherwise \
a single other *.safetensors file is used; `text_encoder.safetensors` is always ignored.\n\n\
If none exists, the path is probably one folder too high or too low (diffusers keeps a model's weights in \
`transformer/`). If several exist, Tessera does not guess: a folder often contains two precisions of one model. Pass the \
file itself. Shards without their index cannot be distinguished from a partial download: fetch the index too. All missing \
shards are listed at once.";

    T0502: "a weight file is truncated",
    "A safetensors file starts with the length of its header, followed by the header and all tensors without gaps. \
This file ends before the end that its header declares. No part of it is used.\n\n\
The usual causes are an interrupted download or copy, a full disk, or a file that another process is still writing. \
Compare its size with the expected number of bytes in the message; if it is still growing, wait; otherwise fetch it \
again. With several hosts, check each host's copy: one truncated copy among good ones is a common reason why one rank \
fails alone.";

    T0503: "a weight file is not safetensors",
    "The first bytes do not start a JSON object of tensors within the limit of 100 000 000 bytes, so this is \
another kind of file, or its beginning is damaged.\n\n\
Files often mistaken for weights: a web page saved instead of a download, a GGUF file, an archive of several \
files. A checkpoint of PyTorch is read too (T0511), and a Git LFS pointer has a code of its own (T0513). A tensor \
name that appears twice in a header is rejected too, because readers disagree on which one counts.";

    T0504: "a header's tensors do not match the file's bytes",
    "The header of a safetensors file states a shape, a dtype and a byte range for each \
tensor. The length of the range must be the number of elements times the bytes of one element. \
Together the ranges must cover the bytes after the header exactly once: without an overlap, a \
gap or a rest at the end. Here they do not; the message states where.\n\n\
The file was damaged, or a faulty tool wrote it. To read it could mix one tensor's values into \
another, which no later check would detect. Fetch the file again, or write it again with a \
current version of the safetensors library.";

    T0505: "an index and its shards disagree",
    "`*.safetensors.index.json` maps each tensor to a shard. Each tensor must be in that shard and in no \
other, and no shard may contain a tensor that is not in the index.\n\n\
A disagreement usually means that index and shards come from two revisions of a model, or that a download was \
resumed after an update. Other tools load mixed revisions without an error and produce wrong output; Tessera rejects \
them. Fetch everything again from one revision. An index may not name files outside its own folder.";

    T0506: "weights and model do not match",
    "The model's config determines the tensors and their shapes. The files must contain exactly these: \
a missing tensor would have to be invented, an extra one is a part of the model that would be silently dropped, and a \
misshapen one belongs to another model size. All differences are listed at once; `--format json` lists them without a \
limit.\n\n\
Read the counts first. All missing and equally many extra: the files use names that Tessera does not know, or \
have another architecture. All misshapen: the config has another size. A few missing: a partial conversion, \
or a typo that the suggested name shows. A few extra: often a LoRA, an EMA copy or optimizer state that should \
not have been written to the file.\n\n\
Readable dtypes are F32, F16, BF16, and F8_E4M3 with scales: one number or one per row, in a tensor with the weight's \
name whose last part is `scale_weight` or `weight_scale`. F64, integers and FP8 without a scale are rejected: converting \
them involves choices (rounding, scales) that the exporter of the model must make.\n\n\
A missing tensor has the name that the files would give it, with the prefix of their other tensors.";

    T0507: "a weight slice does not exist",
    "A rank requested a weight that is not in the set, or a range outside its shape. The names and shapes \
come from the model's config, the ranges from the plan, so the two belong to different models.\n\n\
Plan again with the config in the weights' folder. If plan and config agree, this is a bug: report it with the plan \
and with the weight's name and shape from the message.";

    T0508: "a weight file cannot be read",
    "The operating system refused to open or map the file; the message contains its error text. Check the path, \
the permissions of each folder on the path, and, for network file systems, whether this host has them mounted. \
Pipes and devices are rejected: weights must be a regular file.\n\n\
Weights are mapped, not copied, so a file must not change while a run uses it. Replace weights by writing a new file \
and renaming it over the old one. Truncating a file in place during a run ends that run with SIGBUS.";

    T0509: "an element of a weight is not finite",
    "An element of this tensor is NaN or infinite in the file. Every value that is computed from it is NaN too, so \
a run with this tensor would complete and produce black frames.\n\n\
The message names the file, the tensor, and the index of its first such element. The usual causes are a training run that \
diverged before the checkpoint was written, a conversion to a narrower dtype that overflowed, and damage to the file. \
Compare the file's hash with the publisher's, and fetch it again if they differ.";

    T0510: "a checkpoint contains code",
    "A PyTorch checkpoint (.pt, .pth, .bin) holds a pickle, and a pickle is a program: it may import any function and \
call it, for example os.system. Tessera executes nothing of it. It knows the six names by which PyTorch stores tensors and \
ordered dicts, and refuses a file that uses another one; the message states the name and the byte.\n\n\
Often the name is harmless: a training config (omegaconf, argparse.Namespace), an optimizer or a numpy scalar that was \
saved beside the weights. If you trust the publisher, load the file with PyTorch on a machine without secrets, keep the \
tensors alone, and write them as safetensors. If the name runs commands or opens connections (os, subprocess, builtins, \
socket), do not load it anywhere, and report it to the place from which you have it.";

    T0511: "a PyTorch checkpoint cannot be read",
    "Since version 1.6, torch.save writes a zip archive with an entry data.pkl, which describes the tensors, and one \
uncompressed entry per storage. The message states what differs here: another kind of archive, a TorchScript program, an \
entry that is missing or too short, or a pickle that ends early.\n\n\
A file in the older format (a bare pickle) must be written again: torch.save(torch.load(IN, map_location='cpu', \
weights_only=True), OUT). For any other message compare the file's size and hash with those that the publisher states, \
and fetch it again if they differ.";

    T0512: "a tensor of a checkpoint is not contiguous",
    "A PyTorch checkpoint stores tensors as views of storages, and a view may be transposed, skip elements or repeat \
them. Tessera maps files instead of copying them, so it reads tensors whose elements lie one after another in row-major \
order, as in safetensors. The message names each tensor with its shape and strides.\n\n\
Write the checkpoint again with contiguous tensors: torch.save({k: v.contiguous() for k, v in state.items()}, OUT).";

    T0513: "a Git LFS pointer instead of a file",
    "A repository with Git LFS holds a text of about 130 bytes in place of each large file. `git clone` without Git LFS, \
or with GIT_LFS_SKIP_SMUDGE=1, leaves this text under the name of the weights.\n\n\
Install Git LFS and run `git lfs pull` in the repository; `--include` limits it to the files that you need. Or download \
the files with the publisher's own tool. The message states the size that the complete file will have.";

    T0514: "a LoRA does not fit the model",
    "A LoRA file holds pairs of low-rank factors, one pair for each matrix that it changes: the matrix becomes W + strength · \
alpha / r · up · down. Every factor must belong to a matrix of the generator and have its extents; the notes list those that do \
not. The names of diffusers, PEFT and kohya files are known, with either naming of the generator.\n\n\
A LoRA for another size of the model has other extents. Factors of a text encoder (`lora_te_…`), whole differences (`.diff`), \
DoRA magnitudes and Conv factors are not low-rank updates of a generator's matrices. They are rejected and not skipped, because \
a stream without them would look almost as intended. If all factors are unknown, compare the names of the file with those of the \
checkpoint, which `tessera check MODEL` reads.";
}
