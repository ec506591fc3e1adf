//! The diagnostic codes of this crate with their explain pages, ordered by id.

use crate::Code;

/// Diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[&T0001, &T0002, &T0003, &T0004];

pub static T0001: Code = Code {
    id: "T0001",
    title: "config file cannot be read",
    page: "The file is not valid JSON (config.json) or TOML (stream.toml, a mapping). The \
message gives the position at which the parser stopped: correct the file there.",
};

pub static T0002: Code = Code {
    id: "T0002",
    title: "unknown config key",
    page: "Tessera rejects keys that it does not know instead of ignoring them: if a misspelt `windw_frames` were \
dropped silently, a different model would run from the one that was intended. The message names the closest known key.",
};

pub static T0003: Code = Code {
    id: "T0003",
    title: "config key missing",
    page: "The key has no safe default: a guessed value would run a different model. Add the key to the \
file and table that the message names; the model's own release documents the value it was trained with.",
};

/// A value has the wrong type or is out of range.
pub static T0004: Code = Code {
    id: "T0004",
    title: "config value has the wrong type",
    page: "The key is known, but its value has the wrong type (for instance text where an integer is \
expected) or is out of range. The message shows the value that was found.",
};
