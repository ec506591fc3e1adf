//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0410: "model dimensions contradict each other",
    "Some dimensions in config.json do not describe a Wan DiT that can run; the message \
shows the numbers. `dim` must be a multiple of the number of heads. The width of a head must be \
even and at least 6, because RoPE rotates pairs of channels and divides them among three \
positions: frame, row and column. Input and output channels must be equal, `freq_dim` even, \
`eps` positive, and a patch one frame long. A tensor of more than 2^40 elements and a model of \
more than 1024 blocks are treated as typos.\n\n\
A key that selects a variant of the model (qk_norm, window_size, model_type, image_dim and \
similar keys) must have the value of the implemented variant. Any other value describes another \
model, for which this implementation would produce plausible but wrong output.\n\n\
Compare config.json with the file that the publisher of the model provides.";

    T0411: "stream settings contradict each other",
    "stream.toml defines how a model is streamed. The picture size must be a multiple of the patch size, the \
cache window a multiple of the chunk size and at least one chunk, and the channels of the decoder must match the model. \
The recompute regime needs a window of exactly two chunks. \
A sink (`cache.sink`) is a multiple of the chunk size, smaller than the window, and needs the resident regime, as does \
`cache.recache`, for which the window must hold one more chunk than the sink and the new one. `cache.positions` lies between the window \
and the RoPE table. A scale of guidance (`guidance.scale`, `--guidance`) is above 0 and at most 1000, and a negative prompt needs one. A window or a sink that config.json states (local_attn_size, sink_size) must be the stream's. The window, the rows and the columns of tokens may each not \
be longer than the model's RoPE table (rope_max_seq_len in config.json), which defines the positions. Steps must decrease, \
and a warped step must be an integer, because it is a row of the noise schedule. A final step 0 is dropped for a model that \
predicts the flow, since σ = 0 does not move its input, and rejected for one that predicts x0, which would run once more. A tensor of more than 2^40 elements, a call of more than \
2^60 operations, more than 64 chunks in the window or more than 100 steps are treated as typos. The message shows the \
numbers.";

    T0412: "the first denoising step is not pure noise",
    "A step's input is (1 − σ) · latents + σ · noise, and the latents before a chunk's first step are those of the chunk \
before it. With σ below 1 a part of them would stay in the new chunk: a ghost of the previous picture, and zeros in the \
first chunk and after a cut. The first entry of schedule.steps must therefore have σ = 1, which 1000 has under every \
shift.\n\n\
Schedules such as 700, 500, 400, 200 belong to video-to-video, which starts from the latents of an input video: \
`[input] video = true` in stream.toml, or `--video`.";

    T0413: "tensors do not describe a Wan generator",
    "A checkpoint without a config.json is described by its tensors: the patch embedding gives the width and the \
channels, the first block the feed-forward width, the names the number of blocks. The message lists the tensors that are \
missing or have another number of dims, so the file is another model, or one part of it (a VAE, a text encoder, an \
adapter).\n\n\
No tensor shows the width of a head. It is 128 in every published Wan model; a model with other heads needs its \
config.json beside the weights.";

    T0414: "the config describes another VAE",
    "Tessera decodes with the causal VAE of Wan2.1, whose config.json has the class AutoencoderKLWan and no residual \
shortcuts between levels. The VAE of Wan2.2 has 48 channels, patches of 2 × 2 pixels and such shortcuts (`is_residual`), and \
its latents mean nothing to a generator of Wan2.1. The message shows the key that differs.\n\n\
Use the VAE that was published with the generator.";

    T0415: "tensors do not describe a tiny decoder of these latents",
    "The tiny decoder of Wan2.1 (TAEHV, published as taew2_1) is described by its own tensors: decoder.1 gives the channels of the \
latents, decoder.7, 13 and 19 the frames that each stage makes of one, decoder.22 the colours. The message names the tensor \
that is missing or has another shape. Decoders of the same family exist for other models: that of Wan2.2 decodes 48 channels \
and that of HunyuanVideo 1.5 decodes 32, both with patches of 2 × 2 pixels.\n\n\
Use taew2_1.pth or taew2_1.safetensors.";

    T0420: "prompt is empty",
    "A prompt needs at least one word; an empty one would condition the model on padding alone. For the demo \
model try `a red circle moves right`.";

    T0421: "word is not in the model's vocabulary",
    "The model's text encoder is a table with one row per word, listed in vocab.txt in its folder. The model cannot \
represent a word without a row, so the prompt is rejected; dropping the word would change its meaning.";

    T0422: "text does not fit the model",
    "A prompt may have at most text_len words (config.json), and the word table must have one row of text_dim \
numbers per line of vocab.txt. A word may occur there only once, regardless of letter case: a second row would never be \
read, and every row after it would belong to the wrong word.";

    T0430: "unknown architecture of a language model",
    "A config.json names its architecture under `architectures`. The planner describes \
every part of a layer by an op row, an op that is counted and cannot run. It can do so only for \
architectures that it knows; the message lists them.\n\n\
Many releases equal one of these under another name. If yours does, put the known name into a \
copy of the config and compare the parameter count that `tessera plan` prints with the \
published one before you trust the rest.";

    T0431: "dims of a language model contradict each other",
    "A layer requires: the number of query heads a multiple of the number of KV heads; a head width, given or as \
hidden_size over the heads; no more experts per token than there are experts. The message shows the numbers.\n\n\
A weight of more than 2^40 elements, or more than 1024 layers, is treated as a typo.";

    T0432: "config key selects an unsupported variant",
    "The key changes what a layer computes or its attention span (a sliding window, another activation, experts in \
some layers only), and the op rows do not describe this value. An estimate that ignored it would describe another \
model, so the config is rejected. The hint lists the accepted values.\n\n\
Keys that change no shape, such as rotary bases, token ids or the precision of a checkpoint, are ignored.";

    T0433: "language model cannot run",
    "The config describes a model that `tessera plan` can estimate, but no program here computes one of its parts: the message names it. Models of the families Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE and DeepSeek-V3 run: attention with grouped KV heads or over latents, rotary positions, \
RMS norms, and feed-forward layers with a gate.\n\n\
Weights must be floats. A checkpoint whose config has a `quantization_config`, such as the FP8 release of DeepSeek-V3, stores other numbers with scales beside them: convert it to \
bf16 and remove the key.";

    T0450: "text encoder is not a UMT5 encoder that can run",
    "With `encoder = \"umt5\"` in stream.toml, the folder text_encoder holds the encoder's own config.json in the format of \
transformers. A key there selects another architecture or another feed-forward layer, for which the program would produce \
plausible but wrong embeddings; or some dims contradict each other, and the message shows them. The width of the encoder \
(d_model) must equal the text_dim of the DiT's config.json, because the DiT reads the encoder's rows. More than 2^24 tokens, \
more than 1024 blocks or a tensor of more than 2^40 elements are treated as typos.\n\n\
Compare the file with the one that the publisher of the model provides. A folder without config.json holds UMT5-XXL.";
}
