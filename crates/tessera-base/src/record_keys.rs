//! Keys of a run's record that ranks report and the report reads. The crates on both sides use no crate in common but this one.

/// Prefix of the keys of transports in the start of a rank: a space and the communicator follow.
pub const TRANSPORT_KEY: &str = "transport:";
