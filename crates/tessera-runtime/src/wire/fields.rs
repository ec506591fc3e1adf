//! The envelope's fields as a table: the reference page is printed from it and the negative tests walk it.

/// One field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Name in the code.
    pub name: &'static str,
    /// Type on the wire.
    pub ty: &'static str,
    /// When it must be there.
    pub required: &'static str,
    /// Why it travels.
    pub why: &'static str,
    /// Codes with which it is refused, by the leader before it sends and by every worker before it is ready.
    pub checked: &'static str,
}

const fn field(
    name: &'static str,
    ty: &'static str,
    required: &'static str,
    why: &'static str,
    checked: &'static str,
) -> Field {
    Field { name, ty, required, why, checked }
}

/// Every field of an envelope, in wire order.
#[rustfmt::skip]
pub const FIELDS: &[Field] = &[
    field("version", "u16", "always", "Fields and their meaning are never guessed across versions", "T0701"),
    field("action", "enum", "always", "NOOP, INFER, RESET, RELOAD, WARMUP or SHUTDOWN, each in its place", "T0733"),
    field("plan", "digest", "always", "What a rank runs is compared with one sealed plan", "T0731"),
    field("session", "u64", "always", "A process of an earlier run cannot speak into this one", "T0731"),
    field("call_id", "u64", "always", "Grows by one over all actions, so nothing is lost or handled twice", "T0730"),
    field("chunk", "u32", "always", "Names the output and the random draws", "T0712"),
    field("cache_epoch", "u32", "always", "Grows at a hard cut, a reset or a reload and at nothing else", "T0712"),
    field("deadline_ms", "u32", "always, not 0", "Every wait has a limit", "T0732"),
    field("meta", "struct", "INFER and WARMUP, nothing else", "The leader's decisions; no action without payload carries any", "T0732"),
    field("n_steps", "u32", "INFER", "Denoise passes of the call", "T0732"),
    field("expected_generator_calls", "u32", "INFER", "A rank that would run one more or one less stops before the first extra collective", "T0734"),
    field("expected_collectives", "u64", "INFER", "Compared with what each rank issued", "T0734"),
    field("expected_trace_digest", "digest", "INFER", "Same collectives in the same order on every rank", "T0734"),
    field("reset_kv", "bool", "INFER", "A hard cut is decided once", "T0712"),
    field("reset_cross", "bool", "INFER", "New text keys and values are decided once; goes with the text tensor", "T0732"),
    field("recompute", "bool", "INFER", "Whether the cache is filled from context; goes with the context tensor", "T0732"),
    field("start_frame", "u32", "INFER", "Rotary positions are part of the contract", "T0712"),
    field("seed", "u64", "INFER", "Random draws are a pure function of seed, chunk, draw and element", "T0732"),
    field("prompt_epoch", "u32", "INFER", "A stale prompt on one rank is found before it is used", "T0712"),
    field("kv_bias", "f32 bits", "INFER, finite and above 0", "Selects the weight of context keys", "T0732"),
    field("phases", "list of (program, scalars)", "INFER", "What runs, in order; a program outside the seal is refused", "T0722"),
    field("predicted_state", "digest", "INFER", "Leader and rank predict the same cache state", "T0712"),
    field("reload", "struct", "RELOAD, nothing else", "Source and digest of the weights that every rank loads between the same two calls", "T0732"),
    field("text", "tensor", "reset_cross", "Prompt embedding, on change only", "T0735"),
    field("context", "tensor, in a second message", "recompute", "Context latents; depend on the previous chunk's output", "T0735"),
];

/// What an envelope does not carry, and why.
const ABSENT: &[(&str, &str)] = &[
    ("noise", "every rank draws it from seed, chunk and draw"),
    ("key and value contents", "equal inputs and equal state digests make equal caches"),
    ("the evicted span", "it follows from the fill level"),
    ("pixels", "only the delivering rank sees them"),
];

/// The reference page, as Markdown.
#[must_use]
pub fn envelope_reference() -> String {
    let mut out = format!(
        "# Envelope, version {}\n\n\
One envelope is one call. It travels as one frame: header, meta bytes in one canonical form, tensors in manifest\n\
order. The leader checks every field before the first byte leaves; every worker checks the same before it answers\n\
ready, and no collective is issued before all are. This page is printed from the table in the code.\n\n\
| field | type | required when | why | refused with |\n| --- | --- | --- | --- | --- |\n",
        super::WIRE_VERSION
    );
    for f in FIELDS {
        out += &format!("| `{}` | {} | {} | {} | {} |\n", f.name, f.ty, f.required, f.why, f.checked);
    }
    out += "\n## What does not travel\n\n";
    for (what, why) in ABSENT {
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
