//! The diagnostic codes of this crate with their explain pages, ordered by id.

crate::codes! {
    T0001: "config file cannot be read",
    "The file is not valid JSON (config.json) or TOML (stream.toml, a mapping). The \
message gives the position at which the parser stopped: correct the file there.";

    T0002: "unknown config key",
    "Tessera rejects keys that it does not know instead of ignoring them: if a misspelt `windw_frames` were \
dropped silently, a different model would run from the one that was intended. The message names the closest known key.";

    T0003: "config key missing",
    "The key has no safe default: a guessed value would run a different model. Add the key to the \
file and table that the message names; the model's own release documents the value it was trained with.";

    T0004: "config value has the wrong type",
    "The key is known, but its value has the wrong type (for instance text where an integer is \
expected) or is out of range. The message shows the value that was found.";
}
