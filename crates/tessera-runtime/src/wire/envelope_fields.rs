//! The envelope's fields as a table. The reference page is generated from this table, and the
//! negative tests break each field in turn.

/// A row of [`ENVELOPE_FIELDS`]: a field, when it is required, and the codes that reject it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnvelopeField {
    /// Name of the struct field, or of the tensor for `text` and `context`.
    pub name: &'static str,
    /// Type on the wire, in words for the reference page, such as `f32 bits`.
    pub ty: &'static str,
    /// Actions or other fields that require the field, such as `INFER` or `reset_cross`.
    pub required: &'static str,
    /// Why the field is on the wire.
    pub reason: &'static str,
    /// Codes of the diagnostics that reject a bad value, in the leader before sending and in every
    /// worker before it answers ready.
    pub codes: &'static str,
}

const fn envelope_field(
    name: &'static str,
    ty: &'static str,
    required: &'static str,
    why: &'static str,
    checked: &'static str,
) -> EnvelopeField {
    EnvelopeField { name, ty, required, reason: why, codes: checked }
}

/// Every field of an envelope, in wire order.
#[rustfmt::skip]
pub const ENVELOPE_FIELDS: &[EnvelopeField] = &[
    envelope_field("version", "u16", "always", "Fields and their meaning are never guessed across versions", "T0701"),
    envelope_field("action", "enum", "always", "NOOP, INFER, RESET, RELOAD, WARMUP or SHUTDOWN, each only where the protocol allows it", "T0733"),
    envelope_field("plan", "digest", "always", "Every rank must run the same sealed plan", "T0731"),
    envelope_field("session", "u64", "always", "A process of an earlier run cannot take part in this one", "T0731"),
    envelope_field("call_id", "u64", "always", "Grows by one over all actions, so no call is lost or handled twice", "T0730"),
    envelope_field("chunk", "u32", "always", "Identifies the output and the random draws", "T0712"),
    envelope_field("cache_epoch", "u32", "always", "Grows at a hard cut, a reset or a reload, and never otherwise", "T0712"),
    envelope_field("deadline_ms", "u32", "always, not 0", "Every wait has a limit", "T0732"),
    envelope_field("meta", "struct", "INFER and WARMUP only", "The leader's decisions; an action without payload carries none", "T0732"),
    envelope_field("work", "enum", "INFER and WARMUP", "A warm-up, a chunk of a video, rows of tokens or an array program, as the session computes; the fields up to `rows` belong to one kind", "T0732"),
    envelope_field("step_list", "u32", "INFER of a chunk", "The noise levels and timesteps of the phases are those of this list of the sealed plan", "T0732"),
    envelope_field("n_steps", "u32", "INFER of a chunk", "Number of denoise forwards in the call", "T0732"),
    envelope_field("expected_generator_calls", "u32", "INFER", "A rank that would run one forward more or fewer stops before the first extra collective", "T0734"),
    envelope_field(
        "expected_collectives",
        "u64",
        "INFER",
        "Compared with the number over all ranks of the mesh, which each rank reports",
        "T0734",
    ),
    envelope_field("expected_trace_digest", "digest", "INFER", "Every rank must issue the same collectives in the same order", "T0734"),
    envelope_field("reset_kv", "bool", "INFER of a chunk", "The leader alone decides a hard cut", "T0712"),
    envelope_field("reset_cross", "bool", "INFER of a chunk", "The leader alone decides when the text keys and values change; requires the text tensor", "T0732"),
    envelope_field("recompute", "bool", "INFER of a chunk", "Whether the cache is filled from context frames; requires the context tensor", "T0732"),
    envelope_field("start_frame", "u32", "INFER of a chunk", "RoPE positions must be equal on every rank", "T0712"),
    envelope_field("seed", "u64", "INFER of a chunk", "Random draws are a pure function of seed, chunk, draw and element", "T0732"),
    envelope_field("prompt_epoch", "u32", "INFER of a chunk", "Detects a stale prompt on one rank before the prompt is used", "T0712"),
    envelope_field("kv_bias", "f32 bits", "INFER of a chunk, finite and above 0", "Sets the weight of context keys", "T0732"),
    envelope_field("ended", "list of u64", "INFER of tokens", "Sequences whose pages are free again, so that every rank has the same free pages", "T0710"),
    envelope_field("begun", "list of (u64, pages)", "INFER of tokens", "The leader alone decides which pages a sequence has", "T0710"),
    envelope_field("rows", "list of (u64, first, count)", "INFER of tokens", "Rows must continue their sequence at the same position on every rank", "T0712"),
    envelope_field("phases", "list of (program, scalars)", "INFER", "Programs to run, in order; a program outside the sealed plan is rejected", "T0722"),
    envelope_field("predicted_state", "digest", "INFER", "Leader and ranks must predict the same cache state", "T0712"),
    envelope_field("reload", "struct", "RELOAD only", "Source and digest of the weights that every rank loads between the same two calls", "T0732"),
    envelope_field("text", "tensor", "reset_cross", "Prompt embedding, under guidance with the negative prompt's below it; sent only when it changes", "T0735"),
    envelope_field("noise", "tensor", "the plan takes given noise", "Noise of the first denoise step of a chunk, so that a reference run can be repeated", "T0735"),
    envelope_field("array inputs", "tensors", "INFER of an array program", "The whole arrays that the program reads; each rank copies its shards", "T0735"),
    envelope_field("video", "tensor", "the call begins with an input video", "Encoded latents of an input video, which only the leader reads; the phases state the step that adds noise to them", "T0735"),
    envelope_field("context", "tensor, in a second message", "recompute", "Context latents, which depend on the previous chunk's output", "T0735"),
];

/// Content that an envelope omits, and why.
const OMITTED_CONTENT: &[(&str, &str)] = &[
    ("drawn noise", "every rank draws it from seed, chunk and draw"),
    ("KV cache contents", "equal inputs and equal state digests produce equal caches"),
    ("the evicted span", "it follows from the fill level"),
    ("pixels", "only the delivering rank decodes them"),
];

/// Renders [`ENVELOPE_FIELDS`] and the omitted content as the page `docs/reference/envelope.md`.
#[must_use]
pub fn envelope_reference() -> String {
    let mut out = format!(
        "# Envelope, version {}\n\n\
One envelope is one call. It travels as one frame: header, meta bytes in one canonical form, tensors in manifest\n\
order. The leader checks every field before it sends the first byte. Every worker repeats the checks before it answers\n\
ready, and no rank issues a collective before all ranks are ready. This page is generated from the table in the code.\n\n\
| field | type | required when | why | rejected with |\n| --- | --- | --- | --- | --- |\n",
        super::WIRE_VERSION
    );
    for f in ENVELOPE_FIELDS {
        out += &format!("| `{}` | {} | {} | {} | {} |\n", f.name, f.ty, f.required, f.reason, f.codes);
    }
    out += "\n## Content that is not sent\n\n";
    for (what, why) in OMITTED_CONTENT {
        out += &format!("- {what}: {why}.\n");
    }
    out += "\n## Limits of a frame\n\n";
    for (what, limit) in [
        ("header", super::HEADER_BYTES as u64),
        ("meta", u64::from(super::MAX_META_BYTES)),
        ("tensors", u64::from(super::MAX_TENSOR_BYTES)),
    ] {
        out += &format!("- {what}: {limit} bytes\n");
    }
    out += &format!(
        "- tensors in a manifest: {}\n- phases of a call: {}\n",
        super::MAX_TENSORS,
        super::MAX_PHASES
    );
    out
}
